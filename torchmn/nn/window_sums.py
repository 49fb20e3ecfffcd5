"""The sums of all windows of an image, and the image that is the sum of windows of equal values.

The two are each other's adjoint, so that each is the other's gradient, to any order. They add shifted images, row by
row and column by column, which is several times as fast as torch's average pools. A sum of squares is zero exactly
where all squares are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """Which windows of an image: of `kernel`, every `stride`-th, in an image of `size` that contains its padding."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]

    def along(self, dim: int, at: int) -> slice:
        """Along height (0) or width (1), the pixels at place `at` of all windows."""
        count = (self.size[dim] - self.kernel[dim]) // self.stride[dim] + 1
        return slice(at, at + (count - 1) * self.stride[dim] + 1, self.stride[dim])


def window_sums(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """The sum of each window that lies fully in the image: (..., out_height, out_width) from (..., height, width)."""
    return _Sums.apply(x, Windows((x.shape[-2], x.shape[-1]), kernel, stride))  # type: ignore[return-value]


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: Windows) -> Tensor:
        ctx.windows = windows
        rows = x[..., windows.along(1, 0)].clone(memory_format=torch.contiguous_format)
        for at in range(1, windows.kernel[1]):
            rows.add_(x[..., windows.along(1, at)])
        sums = rows[..., windows.along(0, 0), :].clone(memory_format=torch.contiguous_format)
        for at in range(1, windows.kernel[0]):
            sums.add_(rows[..., windows.along(0, at), :])
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(gradients[0], ctx.windows), None  # type: ignore[return-value]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, windows: Windows) -> Tensor:
        ctx.windows = windows
        height, width = windows.size
        rows = sums.new_zeros(*sums.shape[:-2], height, sums.shape[-1])
        for at in range(windows.kernel[0]):
            rows[..., windows.along(0, at), :].add_(sums)
        image = sums.new_zeros(*sums.shape[:-2], height, width)
        for at in range(windows.kernel[1]):
            image[..., windows.along(1, at)].add_(rows)
        return image

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Sums.apply(gradients[0], ctx.windows), None  # type: ignore[return-value]
