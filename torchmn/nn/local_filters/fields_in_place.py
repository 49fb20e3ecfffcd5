"""Products of receptive fields where they lie in the image, one row of the kernel at a time.

What a row of the kernel sees is one run of memory, and for all positions of a row these runs are one strided matrix
each: their products are one call, without a copy. For the names and shapes see `receptive_fields`; all arguments must
be contiguous, of more than one image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.nn.local_filters.tiling import Tiling


def put_outputs(values: Tensor, image: Tensor, filters: Tensor, tiling: Tiling) -> None:
    """Write (row, column, out_map, batch)."""
    down = tiling.stride[0]
    fields = _fields(image, tiling.kernel[1], tiling.stride[1]).transpose(2, 3).unbind()
    for row, (y, weights) in enumerate(zip(values.unbind(), filters.flatten(4).unbind(), strict=True)):
        for at, part in enumerate(weights.unbind(2)):
            _put_product(y, part, fields[row * down + at], adds=at > 0)


def decoded(values: Tensor, filters: Tensor, tiling: Tiling) -> Tensor:
    """(height, width, map, batch), for a stride of 1.

    Seen from a pixel, the values of the filters that reach it are a field, too: so this is a sum of products again,
    and nothing has to be added up where fields overlap.
    """
    rows, columns, out_maps, batch = values.shape
    height, width = tiling.kernel
    # Filters of no value stand at both ends of each row.
    around = values.new_zeros(rows, columns + 2 * (width - 1), out_maps, batch)
    around.narrow(1, width - 1, columns).copy_(values)
    fields = _fields(around, width, 1).transpose(2, 3).unbind()
    image = values.new_empty(*tiling.size, filters.shape[5], batch)
    lines = image.unbind()
    turned = _turned(filters, tiling.size[1]).flatten(3, 4).transpose(3, 4)
    for row, (field, weights) in enumerate(zip(fields, turned.unbind(), strict=True)):
        for at, part in enumerate(weights.unbind()):
            is_first = row == 0 or at == height - 1
            _put_product(lines[row + at], part, field, adds=not is_first)
    return image


def put_filters(filters: Tensor, image: Tensor, values: Tensor, tiling: Tiling) -> None:
    """Write (row, column, out_map, kernel row, kernel column, map)."""
    (rows, columns, out_maps, _), (height, width), maps = values.shape, tiling.kernel, image.shape[2]
    fields = _fields(image, width, tiling.stride[1]).unbind()
    found = image.new_empty(rows, height, columns, out_maps, width * maps)
    for row, (y, weights) in enumerate(zip(values.unbind(), found.unbind(), strict=True)):
        for at, part in enumerate(weights.unbind()):
            torch.bmm(y, fields[row * tiling.stride[0] + at], out=part)
    filters.flatten(4).copy_(found.permute(0, 2, 3, 1, 4))


def _fields(image: Tensor, width: int, stride: int) -> Tensor:
    """What `width` neighbours in a row of the image show: (row, column, batch, neighbour and map). A view."""
    maps = image.shape[2]
    return image.flatten(1, 2).unfold(1, width * maps, stride * maps)


def _put_product(into: Tensor, left: Tensor, right: Tensor, adds: bool) -> None:
    if adds:
        into.baddbmm_(left, right)
    else:
        torch.bmm(left, right, out=into)


def _turned(filters: Tensor, columns: int) -> Tensor:
    """What pixels see of the filters that reach them: (row, kernel row, column of a pixel, filter, out_map, map).

    Of the filters of a row that reach a pixel, the leftmost comes first: it shows the pixel its last kernel column.
    """
    rows, positions, out_maps, height, width, maps = filters.shape
    turned = filters.new_zeros(rows, height, columns, width, out_maps, maps)
    for at, weights in enumerate(filters.permute(0, 3, 1, 4, 2, 5).unbind(3)):
        turned[:, :, at : at + positions, width - 1 - at] = weights
    return turned
