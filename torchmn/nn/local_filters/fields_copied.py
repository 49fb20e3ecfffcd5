"""Products of receptive fields by copying (unfolding) them.

Fields are copied for a few rows of positions at a time, so that copies stay in the processor's cache until they are
multiplied. For names and shapes see `receptive_fields`; all arguments must be contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from torchmn.nn.local_filters.field_grid import FieldGrid

BLOCK_BYTES = 2 << 20  # of copies; half and twice as much are equally fast, all fields at once half as fast


def put_outputs(values: Tensor, image: Tensor, filters: Tensor, field_grid: FieldGrid) -> None:
    """Writes `outputs` into values: (row, column, out_map, batch)."""
    for rows, fields in _unfolded(image, filters.shape[2], field_grid):
        _put_products(_by_position(values[rows]), _matrices(filters[rows]), fields)


def decoded(values: Tensor, filters: Tensor, field_grid: FieldGrid) -> Tensor:
    """Returns (height, width, map, batch); a pixel in no field is 0."""
    (kernel, (down, right)), columns = (field_grid.kernel, field_grid.stride), field_grid.positions[1]
    out_maps, maps, batch = filters.shape[2], filters.shape[5], values.shape[3]
    image = values.new_zeros(*field_grid.size, maps, batch)
    position_bytes = _elements(maps * kernel[0] * kernel[1], out_maps, batch) * values.element_size()
    for rows in _blocks(field_grid, position_bytes):
        fields = _combined(_matrices(filters[rows]), _by_position(values[rows]))
        parts = fields.view(rows.stop - rows.start, columns, *kernel, maps, batch)
        # One addition per position inside the kernel, for all fields at once: fields overlap, but no two of them have
        # the same pixel at the same position. The order of the additions is fixed, so results are deterministic.
        for y, x in product(*map(range, kernel)):
            first, last = rows.start * down + y, (rows.stop - 1) * down + y + 1
            image[first:last:down, x : x + (columns - 1) * right + 1 : right].add_(parts[:, :, y, x])
    return image


def put_filters(filters: Tensor, image: Tensor, values: Tensor, field_grid: FieldGrid) -> None:
    """Writes `filters_of` into filters: (row, column, out_map, kernel row, kernel column, map)."""
    for rows, fields in _unfolded(image, values.shape[2], field_grid):
        _put_outer_products(_matrices(filters[rows]), _by_position(values[rows]), fields)


def _unfolded(image: Tensor, out_maps: int, field_grid: FieldGrid) -> Iterator[tuple[slice, Tensor]]:
    """Yields rows of positions, and a copy of their fields, (position, weight, batch), valid until the next one."""
    (height, width), (down, right) = field_grid.kernel, field_grid.stride
    maps, batch = image.shape[2:]
    position_bytes = _elements(maps * height * width, out_maps, batch) * image.element_size()
    # (row, column, map, batch, y, x) becomes (row, column, y, x, map, batch)
    windows = image.unfold(0, height, down).unfold(1, width, right).permute(0, 1, 4, 5, 2, 3)
    buffer = image.new_empty(_rows_at_once(field_grid, position_bytes), *windows.shape[1:])
    for rows in _blocks(field_grid, position_bytes):
        block = buffer[: rows.stop - rows.start].copy_(windows[rows])
        yield rows, block.flatten(2, 4).flatten(0, 1)


def _blocks(field_grid: FieldGrid, position_bytes: int) -> Iterator[slice]:
    """Yields rows of positions whose fields fit into the cache."""
    rows, step = field_grid.positions[0], _rows_at_once(field_grid, position_bytes)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _rows_at_once(field_grid: FieldGrid, position_bytes: int) -> int:
    rows, columns = field_grid.positions
    most = max(1, BLOCK_BYTES // max(1, columns * position_bytes))
    blocks = -(-rows // most)
    return -(-rows // blocks)  # blocks of about equally many rows


# Products of small matrices with a single vector are computed as elementwise products and sums: torch.bmm takes several
# times as long.
def _put_products(into: Tensor, filters: Tensor, fields: Tensor) -> None:
    """Writes every field's product with its filters, (position, out_map, batch)."""
    if fields.shape[2] != 1:
        torch.bmm(filters, fields, out=into)
    else:
        torch.sum(filters * fields.transpose(1, 2), 2, keepdim=True, out=into)


def _combined(filters: Tensor, values: Tensor) -> Tensor:
    """Returns the sum of the filters of every field times their values, (position, weight, batch)."""
    if values.shape[2] != 1:
        return torch.bmm(filters.transpose(1, 2), values)
    return (filters * values).sum(1).unsqueeze(2)


def _put_outer_products(into: Tensor, values: Tensor, fields: Tensor) -> None:
    """Writes every field times its values, summed over the batch, (position, out_map, weight)."""
    if fields.shape[2] != 1:
        torch.bmm(values, fields.transpose(1, 2), out=into)
    else:
        torch.mul(values, fields.transpose(1, 2), out=into)


def _elements(weights: int, out_maps: int, batch: int) -> int:
    """Returns how many elements of temporary memory the product of one position needs."""
    return weights * (batch if batch != 1 else out_maps)


def _matrices(filters: Tensor) -> Tensor:
    """Returns a view (position, out_map, weight) of filters."""
    return filters.flatten(3).flatten(0, 1)


def _by_position(values: Tensor) -> Tensor:
    """Returns a view (position, out_map, batch) of values."""
    return values.flatten(0, 1)
