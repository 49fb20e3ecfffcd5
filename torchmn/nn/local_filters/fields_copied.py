"""Products of receptive fields that are copied out side by side.

Some rows of positions at a time, so that copies stay in the processor's cache until their product has been taken: no
more than that is ever unfolded. For the names and shapes see `receptive_fields`; all arguments must be contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from torchmn.nn.local_filters.tiling import Tiling

BLOCK_BYTES = 2 << 20  # of unfolded input; half and twice as much are equally fast, all at once is half as fast


def put_outputs(values: Tensor, image: Tensor, filters: Tensor, tiling: Tiling) -> None:
    """Write (row, column, out_map, batch)."""
    for rows, fields in _unfolded(image, filters.shape[2], tiling):
        _put_products(_by_position(values[rows]), _matrices(filters[rows]), fields)


def decoded(values: Tensor, filters: Tensor, tiling: Tiling) -> Tensor:
    """(height, width, map, batch); a pixel in no field is 0."""
    (kernel, (down, right)), columns = (tiling.kernel, tiling.stride), tiling.positions[1]
    out_maps, maps, batch = filters.shape[2], filters.shape[5], values.shape[3]
    image = values.new_zeros(*tiling.size, maps, batch)
    of_a_position = _elements(maps * kernel[0] * kernel[1], out_maps, batch) * values.element_size()
    for rows in _blocks(tiling, of_a_position):
        fields = _combined(_matrices(filters[rows]), _by_position(values[rows]))
        parts = fields.view(rows.stop - rows.start, columns, *kernel, maps, batch)
        # One addition per place inside the kernel, of all fields at once: fields overlap, but no two of them have the
        # same pixel at the same place. The order of the additions is fixed, so results do not vary.
        for y, x in product(*map(range, kernel)):
            first, last = rows.start * down + y, (rows.stop - 1) * down + y + 1
            image[first:last:down, x : x + (columns - 1) * right + 1 : right].add_(parts[:, :, y, x])
    return image


def put_filters(filters: Tensor, image: Tensor, values: Tensor, tiling: Tiling) -> None:
    """Write (row, column, out_map, kernel row, kernel column, map)."""
    for rows, fields in _unfolded(image, values.shape[2], tiling):
        _put_outer_products(_matrices(filters[rows]), _by_position(values[rows]), fields)


def _unfolded(image: Tensor, out_maps: int, tiling: Tiling) -> Iterator[tuple[slice, Tensor]]:
    """Block by block: its rows, and their fields, (position, weight, batch), until the next is taken."""
    (height, width), (down, right) = tiling.kernel, tiling.stride
    maps, batch = image.shape[2:]
    of_a_position = _elements(maps * height * width, out_maps, batch) * image.element_size()
    # (row, column, map, batch, y, x) becomes (row, column, y, x, map, batch)
    windows = image.unfold(0, height, down).unfold(1, width, right).permute(0, 1, 4, 5, 2, 3)
    room = image.new_empty(_rows_at_once(tiling, of_a_position), *windows.shape[1:])
    for rows in _blocks(tiling, of_a_position):
        block = room[: rows.stop - rows.start].copy_(windows[rows])
        yield rows, block.flatten(2, 4).flatten(0, 1)


def _blocks(tiling: Tiling, bytes_of_a_position: int) -> Iterator[slice]:
    """Rows of positions whose fields fit into the cache together."""
    rows, step = tiling.positions[0], _rows_at_once(tiling, bytes_of_a_position)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _rows_at_once(tiling: Tiling, bytes_of_a_position: int) -> int:
    rows, columns = tiling.positions
    most = max(1, BLOCK_BYTES // max(1, columns * bytes_of_a_position))
    blocks = -(-rows // most)
    return -(-rows // blocks)  # blocks of about equally many rows


# A product of a small matrix with a single vector is one of all elements and a sum: torch.bmm takes several times as
# long for it.
def _put_products(into: Tensor, filters: Tensor, fields: Tensor) -> None:
    """Every field's product with its filters, (position, out_map, batch)."""
    if fields.shape[2] != 1:
        torch.bmm(filters, fields, out=into)
    else:
        torch.sum(filters * fields.transpose(1, 2), 2, keepdim=True, out=into)


def _combined(filters: Tensor, values: Tensor) -> Tensor:
    """(position, weight, batch): the sum of the filters of every field, times their values."""
    if values.shape[2] != 1:
        return torch.bmm(filters.transpose(1, 2), values)
    return (filters * values).sum(1).unsqueeze(2)


def _put_outer_products(into: Tensor, values: Tensor, fields: Tensor) -> None:
    """Every field times its values, summed over the batch, (position, out_map, weight)."""
    if fields.shape[2] != 1:
        torch.bmm(values, fields.transpose(1, 2), out=into)
    else:
        torch.mul(values, fields.transpose(1, 2), out=into)


def _elements(weights: int, out_maps: int, batch: int) -> int:
    """How many elements a position takes while its product is taken."""
    return weights * (batch if batch != 1 else out_maps)


def _matrices(filters: Tensor) -> Tensor:
    """(position, out_map, weight) from filters. A view."""
    return filters.flatten(3).flatten(0, 1)


def _by_position(values: Tensor) -> Tensor:
    """(position, out_map, batch) from values. A view."""
    return values.flatten(0, 1)
