"""The receptive fields of an image, copied out side by side, and the sum of such copies back into an image.

The two are each other's adjoint, so that each is the other's gradient, to any order. Images here are
(height, width, map, batch): with the batch last, both are copies of long runs, several times as fast as
`F.unfold` and `F.fold`, and `fields` needs no second copy before it meets a matrix of its own at each position.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tiling(NamedTuple):
    """Which pixels of an image belong to which receptive field. The image contains its padding."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]

    @property
    def positions(self) -> tuple[int, int]:
        """How many fields there are along height and width."""
        return tuple((n - k) // s + 1 for n, k, s in zip(*self, strict=True))  # type: ignore[return-value]


def batch_last(x: Tensor) -> Tensor:
    """(height, width, map, batch) from (batch, map, height, width), in memory of that order."""
    return _BatchLast.apply(x)  # type: ignore[return-value]


def batch_first(image: Tensor) -> Tensor:
    """(batch, map, height, width) from (height, width, map, batch), in memory of that order."""
    return _BatchFirst.apply(image)  # type: ignore[return-value]


def gather(image: Tensor, tiling: Tiling) -> Tensor:
    """The receptive fields of `image`: (positions, maps * kernel height * kernel width, batch).

    image: (height, width, map, batch)
    """
    return _Gather.apply(image, tiling)  # type: ignore[return-value]


def scatter(fields: Tensor, tiling: Tiling) -> Tensor:
    """The image that is the sum of `fields`, each at its place; a pixel in no field is 0.

    fields: (positions, maps * kernel height * kernel width, batch)
    """
    return _Scatter.apply(fields, tiling)  # type: ignore[return-value]


# Not simply permute().contiguous(): its gradient would come in the other order of memory, in which a product of many
# small matrices is computed one by one.
class _BatchLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.permute(2, 3, 1, 0).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return batch_first(gradients[0])


class _BatchFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor) -> Tensor:
        return image.permute(3, 2, 0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return batch_last(gradients[0])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, tiling: Tiling) -> Tensor:
        ctx.tiling = tiling
        (kernel_height, kernel_width), (down, right) = tiling.kernel, tiling.stride
        maps, batch = image.shape[2:]
        windows = image.contiguous().unfold(0, kernel_height, down).unfold(1, kernel_width, right)
        rows, columns = tiling.positions
        # (row, column, map, batch, y, x) becomes (row, column, map, y, x, batch): the one copy.
        return windows.permute(0, 1, 2, 4, 5, 3).reshape(rows * columns, maps * kernel_height * kernel_width, batch)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return scatter(gradients[0], ctx.tiling), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fields: Tensor, tiling: Tiling) -> Tensor:
        ctx.tiling = tiling
        (rows, columns), (down, right) = tiling.positions, tiling.stride
        area = tiling.kernel[0] * tiling.kernel[1]
        maps, batch = fields.shape[1] // area, fields.shape[2]
        parts = fields.reshape(rows, columns, maps, *tiling.kernel, batch)
        image = fields.new_zeros(*tiling.size, maps, batch)
        # One addition per place inside the kernel, of all fields at once: fields overlap, but no two of them have
        # the same pixel at the same place. The order of the additions is fixed, so results do not vary.
        for y, x in product(*map(range, tiling.kernel)):
            image[y : y + down * rows : down, x : x + right * columns : right].add_(parts[:, :, :, y, x])
        return image

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather(gradients[0], ctx.tiling), None
