"""Products of receptive fields without copying them, one row of the kernel at a time.

The pixels under a row of the kernel are contiguous in memory, and those of all positions of a row form strided
matrices, which one batched product multiplies without a copy. For names and shapes see `receptive_fields`; all
arguments must be contiguous, with more than one image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.nn.local_filters.field_grid import FieldGrid


def put_outputs(values: Tensor, image: Tensor, filters: Tensor, field_grid: FieldGrid) -> None:
    """Writes `outputs` into values: (row, column, out_map, batch)."""
    down = field_grid.stride[0]
    fields = _fields(image, field_grid.kernel[1], field_grid.stride[1]).transpose(2, 3).unbind()
    for row, (y, weights) in enumerate(zip(values.unbind(), filters.flatten(4).unbind(), strict=True)):
        for at, part in enumerate(weights.unbind(2)):
            _put_product(y, part, fields[row * down + at], adds=at > 0)


def decoded(values: Tensor, filters: Tensor, field_grid: FieldGrid) -> Tensor:
    """Returns (height, width, map, batch), for a stride of 1.

    The values of the filters that contain a pixel form a field too, so each pixel is a sum of products, and no overlap
    has to be added.
    """
    rows, columns, out_maps, batch = values.shape
    height, width = field_grid.kernel
    padded = values.new_zeros(rows, columns + 2 * (width - 1), out_maps, batch)
    padded.narrow(1, width - 1, columns).copy_(values)
    fields = _fields(padded, width, 1).transpose(2, 3).unbind()
    image = values.new_empty(*field_grid.size, filters.shape[5], batch)
    lines = image.unbind()
    by_pixel = _filters_by_pixel(filters, field_grid.size[1]).flatten(3, 4).transpose(3, 4)
    for row, (field, weights) in enumerate(zip(fields, by_pixel.unbind(), strict=True)):
        for at, part in enumerate(weights.unbind()):
            is_first = row == 0 or at == height - 1
            _put_product(lines[row + at], part, field, adds=not is_first)
    return image


def put_filters(filters: Tensor, image: Tensor, values: Tensor, field_grid: FieldGrid) -> None:
    """Writes `filters_of` into filters: (row, column, out_map, kernel row, kernel column, map)."""
    (rows, columns, out_maps, _), (height, width), maps = values.shape, field_grid.kernel, image.shape[2]
    fields = _fields(image, width, field_grid.stride[1]).unbind()
    found = image.new_empty(rows, height, columns, out_maps, width * maps)
    for row, (y, weights) in enumerate(zip(values.unbind(), found.unbind(), strict=True)):
        for at, part in enumerate(weights.unbind()):
            torch.bmm(y, fields[row * field_grid.stride[0] + at], out=part)
    filters.flatten(4).copy_(found.permute(0, 2, 3, 1, 4))


def _fields(image: Tensor, width: int, stride: int) -> Tensor:
    """Returns a view (row, column, batch, pixel x map) of all runs of `width` pixels in the rows of an image."""
    maps = image.shape[2]
    return image.flatten(1, 2).unfold(1, width * maps, stride * maps)


def _put_product(into: Tensor, left: Tensor, right: Tensor, adds: bool) -> None:
    if adds:
        into.baddbmm_(left, right)
    else:
        torch.bmm(left, right, out=into)


def _filters_by_pixel(filters: Tensor, columns: int) -> Tensor:
    """Returns the weights by which filters contain each pixel: (row, kernel row, column, filter, out_map, map).

    Of the filters in a row that contain a pixel, the leftmost comes first, with its last kernel column.
    """
    rows, positions, out_maps, height, width, maps = filters.shape
    by_pixel = filters.new_zeros(rows, height, columns, width, out_maps, maps)
    for at, weights in enumerate(filters.permute(0, 3, 1, 4, 2, 5).unbind(3)):
        by_pixel[:, :, at : at + positions, width - 1 - at] = weights
    return by_pixel
