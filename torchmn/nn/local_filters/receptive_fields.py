"""Products of every receptive field of an image with filters of its own, and their two adjoints.

    outputs(image, filters)     the values of all filters
    decoded(values, filters)    the image in which every filter, times its value, lies where it took its input from
    filters_of(image, values)   the sums over the batch of every field times its values: the gradient of the filters

Each is linear in both of its arguments, and its gradients are the other two: so all of them can be differentiated to
any order. Images are (height, width, map, batch), values (row, column, out_map, batch), filters (row, column, out_map,
kernel row, kernel column, map).

There are two ways to take the products: of fields where they lie (`fields_in_place`), or of copies of them
(`fields_copied`), for fields whose runs of memory are too short to be taken alone. Nothing unfolded is kept for
backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn.nn.local_filters import fields_copied, fields_in_place
from torchmn.nn.local_filters.tiling import Tiling

SHORTEST_RUN = 16  # rows of a matrix that is worth a product of its own; measured with 8 maps, and with 1


def outputs(image: Tensor, filters: Tensor, tiling: Tiling) -> Tensor:
    """(row, column, out_map, batch) from image: (height, width, map, batch)."""
    return _Outputs.apply(image, filters, tiling)  # type: ignore[return-value]


def decoded(values: Tensor, filters: Tensor, tiling: Tiling) -> Tensor:
    """(height, width, map, batch) from values: (row, column, out_map, batch); a pixel in no field is 0."""
    return _Decoded.apply(values, filters, tiling)  # type: ignore[return-value]


def filters_of(image: Tensor, values: Tensor, tiling: Tiling) -> Tensor:
    """(row, column, out_map, kernel row, kernel column, map), summed over the batch."""
    return _Filters.apply(image, values, tiling)  # type: ignore[return-value]


def put_outputs(into: Tensor, image: Tensor, filters: Tensor, tiling: Tiling) -> None:
    """Write `outputs` into contiguous memory. No autograd."""
    way = fields_in_place if _has_long_runs(image, tiling) else fields_copied
    way.put_outputs(into, image.contiguous(), filters.contiguous(), tiling)


def put_filters(into: Tensor, image: Tensor, values: Tensor, tiling: Tiling) -> None:
    """Write `filters_of` into contiguous memory. No autograd."""
    way = fields_in_place if _has_long_runs(image, tiling) else fields_copied
    way.put_filters(into, image.contiguous(), values.contiguous(), tiling)


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, filters: Tensor, tiling: Tiling) -> Tensor:
        ctx.tiling = tiling
        ctx.save_for_backward(image, filters)
        values = image.new_empty(*tiling.positions, filters.shape[2], image.shape[3])
        if values.shape[0] and values.shape[1]:
            put_outputs(values, image, filters, tiling)
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
        maps = filters.shape[5]
        if 0 in tiling.positions:
            return values.new_zeros(*tiling.size, maps, values.shape[3])
        in_place = tiling.stride == (1, 1) and _has_long_runs(values, tiling) and maps * 4 >= SHORTEST_RUN
        way = fields_in_place if in_place else fields_copied
        return way.decoded(values.contiguous(), filters.contiguous(), tiling)

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
        filters = image.new_empty(*tiling.positions, values.shape[2], *tiling.kernel, image.shape[2])
        if filters.shape[0] and filters.shape[1]:
            put_filters(filters, image, values, tiling)
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


def _has_long_runs(image: Tensor, tiling: Tiling) -> bool:
    """Whether a row of a kernel sees a matrix of (height, width, map, batch) that is worth a product of its own."""
    return image.shape[3] > 1 and tiling.kernel[1] * image.shape[2] >= SHORTEST_RUN
