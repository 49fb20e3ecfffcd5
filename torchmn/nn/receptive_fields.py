"""Products of every receptive field of an image with filters of its own, and their two adjoints.

    outputs(image, filters)     the values of all filters
    decoded(values, filters)    the image in which every filter, times its value, lies where it took its input from
    filters_of(image, values)   the sums over the batch of every field times its values: the gradient of the filters

Each is linear in both of its arguments, and its gradients are the other two: so all of them can be differentiated to
any order. Images are (map, height, width, batch), values (out_map, row, column, batch), filters (position, out_map,
weight of a filter).

Fields are copied out side by side, some rows of positions at a time, so that they stay in the processor's cache until
their product has been taken: no more than that is ever unfolded, and nothing unfolded is kept for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_BYTES = 2 << 20  # of unfolded input; half and twice as much are equally fast, all at once is half as fast


class Tiling(NamedTuple):
    """Which pixels of an image belong to which receptive field. The image contains its padding."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]

    @property
    def positions(self) -> tuple[int, int]:
        """How many fields there are along height and width; none in an image that is smaller than the kernel."""
        return tuple(max(0, (n - k) // s + 1) for n, k, s in zip(*self, strict=True))  # type: ignore[return-value]

    def blocks(self, bytes_of_a_position: int) -> Iterator[tuple[slice, slice]]:
        """Rows of positions whose fields fit into the cache together, and the numbers of their positions."""
        rows, columns = self.positions
        step = self.rows_at_once(bytes_of_a_position)
        for first in range(0, rows if columns else 0, step):
            last = min(first + step, rows)
            yield slice(first, last), slice(first * columns, last * columns)

    def rows_at_once(self, bytes_of_a_position: int) -> int:
        rows, columns = self.positions
        most = max(1, BLOCK_BYTES // max(1, columns * bytes_of_a_position))
        blocks = max(1, -(-rows // most))
        return max(1, -(-rows // blocks))  # blocks of about equally many rows


def outputs(image: Tensor, filters: Tensor, tiling: Tiling) -> Tensor:
    """(out_map, row, column, batch) from image: (map, height, width, batch)."""
    return _Outputs.apply(image, filters, tiling)  # type: ignore[return-value]


def decoded(values: Tensor, filters: Tensor, tiling: Tiling) -> Tensor:
    """(map, height, width, batch) from values: (out_map, row, column, batch); a pixel in no field is 0."""
    return _Decoded.apply(values, filters, tiling)  # type: ignore[return-value]


def filters_of(image: Tensor, values: Tensor, tiling: Tiling) -> Tensor:
    """(position, out_map, maps * kernel height * kernel width), summed over the batch."""
    return _Filters.apply(image, values, tiling)  # type: ignore[return-value]


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, filters: Tensor, tiling: Tiling) -> Tensor:
        ctx.tiling = tiling
        ctx.save_for_backward(image, filters)
        values = image.new_empty(filters.shape[1], *tiling.positions, image.shape[3])
        for rows, at, fields in _unfolded(image, filters.shape[1], tiling):
            values[:, rows] = _by_map(_products(filters[at], fields), tiling)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        image, filters = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            decoded(gradients[0], filters, ctx.tiling) if wanted[0] else None,
            filters_of(image, gradients[0], ctx.tiling) if wanted[1] else None,
            None,
        )


class _Decoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, filters: Tensor, tiling: Tiling) -> Tensor:
        ctx.tiling = tiling
        ctx.save_for_backward(values, filters)
        (kernel, (down, right)), columns = (tiling.kernel, tiling.stride), tiling.positions[1]
        weights, batch = filters.shape[2], values.shape[3]
        maps = weights // (kernel[0] * kernel[1])
        image = values.new_zeros(maps, *tiling.size, batch)
        for rows, at in tiling.blocks(_elements(weights, filters.shape[1], batch) * values.element_size()):
            fields = _combined(filters[at], _by_position(values[:, rows]))
            parts = fields.view(rows.stop - rows.start, columns, maps, *kernel, batch).permute(3, 4, 2, 0, 1, 5)
            # One addition per place inside the kernel, of all fields at once: fields overlap, but no two of them
            # have the same pixel at the same place. The order of the additions is fixed, so results do not vary.
            for y, x in product(*map(range, kernel)):
                first, last = rows.start * down + y, (rows.stop - 1) * down + y + 1
                image[:, first:last:down, x : x + (columns - 1) * right + 1 : right].add_(parts[y, x])
        return image

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, filters = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            outputs(gradients[0], filters, ctx.tiling) if wanted[0] else None,
            filters_of(gradients[0], values, ctx.tiling) if wanted[1] else None,
            None,
        )


class _Filters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, values: Tensor, tiling: Tiling) -> Tensor:
        ctx.tiling = tiling
        ctx.save_for_backward(image, values)
        rows, columns = tiling.positions
        weights = image.shape[0] * tiling.kernel[0] * tiling.kernel[1]
        filters = image.new_empty(rows * columns, values.shape[0], weights)
        for rows, at, fields in _unfolded(image, values.shape[0], tiling):
            _outer_products(_by_position(values[:, rows]), fields, filters[at])
        return filters

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        image, values = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            decoded(values, gradients[0], ctx.tiling) if wanted[0] else None,
            outputs(image, gradients[0], ctx.tiling) if wanted[1] else None,
            None,
        )


def _unfolded(image: Tensor, out_maps: int, tiling: Tiling) -> Iterator[tuple[slice, slice, Tensor]]:
    """Block by block: its rows, its positions, and their fields, (position, weight, batch), until the next is taken."""
    (height, width), (down, right) = tiling.kernel, tiling.stride
    maps, batch = image.shape[0], image.shape[3]
    size = _elements(maps * height * width, out_maps, batch) * image.element_size()
    if 0 in tiling.positions:
        return
    # (map, row, column, batch, y, x) becomes (row, column, map, y, x, batch)
    windows = image.unfold(1, height, down).unfold(2, width, right).permute(1, 2, 0, 4, 5, 3)
    room = image.new_empty(tiling.rows_at_once(size), *windows.shape[1:])
    for rows, at in tiling.blocks(size):
        block = room[: rows.stop - rows.start].copy_(windows[rows])
        yield rows, at, block.view(at.stop - at.start, maps * height * width, batch)


# A product of a small matrix with a single vector is one of all elements and a sum: torch.bmm takes several times as
# long for it.
def _products(filters: Tensor, fields: Tensor) -> Tensor:
    """(position, out_map, batch): every field's product with its filters."""
    if fields.shape[2] != 1:
        return torch.bmm(filters, fields)
    return (filters * fields.transpose(1, 2)).sum(2, keepdim=True)


def _combined(filters: Tensor, values: Tensor) -> Tensor:
    """(position, weight, batch): the sum of the filters of every field, times their values."""
    if values.shape[2] != 1:
        return torch.bmm(filters.transpose(1, 2), values)
    return (filters * values).sum(1).unsqueeze(2)


def _outer_products(values: Tensor, fields: Tensor, filters: Tensor) -> None:
    """Every field times its values, summed over the batch, into `filters`."""
    if fields.shape[2] != 1:
        torch.bmm(values, fields.transpose(1, 2), out=filters)
    else:
        torch.mul(values, fields.transpose(1, 2), out=filters)


def _elements(weights: int, out_maps: int, batch: int) -> int:
    """How many elements a position takes while its product is taken."""
    return weights * (batch if batch != 1 else out_maps)


def _by_map(values: Tensor, tiling: Tiling) -> Tensor:
    """(out_map, row, column, batch) from (position, out_map, batch). A view."""
    return values.view(len(values) // tiling.positions[1], tiling.positions[1], *values.shape[1:]).permute(2, 0, 1, 3)


def _by_position(values: Tensor) -> Tensor:
    """(position, out_map, batch) from (out_map, row, column, batch)."""
    return values.permute(1, 2, 0, 3).flatten(0, 1)
