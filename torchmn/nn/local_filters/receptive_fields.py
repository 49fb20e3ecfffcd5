"""Products of receptive fields with filters that are not shared between positions, and their two adjoints.

    outputs(image, filters)     the products of every field with its filters: values
    decoded(values, filters)    the image that is the sum of all filters times their values, at their positions
    filters_of(image, values)   every field times its values, summed over the batch: the gradient of the filters

Each is linear in both arguments, and its gradients are the other two, so all are differentiable to any order. Images
are (height, width, map, batch), values (row, column, out_map, batch), filters (row, column, out_map, kernel row,
kernel column, map).

There are two implementations: products of fields inside the image (`fields_in_place`), and of copies of fields
(`fields_copied`), which is faster if a row of a field is short. Copies are not saved for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn.nn.local_filters import fields_copied, fields_in_place
from torchmn.nn.local_filters.field_grid import FieldGrid

SHORTEST_RUN = 16  # elements in a row of a field, for products without copies; measured with 8 maps and with 1


def outputs(image: Tensor, filters: Tensor, field_grid: FieldGrid) -> Tensor:
    """Returns (row, column, out_map, batch) from image: (height, width, map, batch)."""
    return _Outputs.apply(image, filters, field_grid)


def decoded(values: Tensor, filters: Tensor, field_grid: FieldGrid) -> Tensor:
    """Returns (height, width, map, batch) from values: (row, column, out_map, batch); a pixel in no field is 0."""
    return _Decoded.apply(values, filters, field_grid)


def filters_of(image: Tensor, values: Tensor, field_grid: FieldGrid) -> Tensor:
    """Returns (row, column, out_map, kernel row, kernel column, map), summed over the batch."""
    return _Filters.apply(image, values, field_grid)


def put_outputs(into: Tensor, image: Tensor, filters: Tensor, field_grid: FieldGrid) -> None:
    """Writes `outputs` into contiguous memory. Not differentiable."""
    implementation = fields_in_place if _has_long_rows(image, field_grid) else fields_copied
    implementation.put_outputs(into, image.contiguous(), filters.contiguous(), field_grid)


def put_filters(into: Tensor, image: Tensor, values: Tensor, field_grid: FieldGrid) -> None:
    """Writes `filters_of` into contiguous memory. Not differentiable."""
    implementation = fields_in_place if _has_long_rows(image, field_grid) else fields_copied
    implementation.put_filters(into, image.contiguous(), values.contiguous(), field_grid)


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, filters: Tensor, field_grid: FieldGrid) -> Tensor:
        ctx.field_grid = field_grid
        ctx.save_for_backward(image, filters)
        values = image.new_empty(*field_grid.positions, filters.shape[2], image.shape[3])
        if values.shape[0] and values.shape[1]:
            put_outputs(values, image, filters, field_grid)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        image, filters = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            decoded(gradients[0], filters, ctx.field_grid) if wanted[0] else None,
            filters_of(image, gradients[0], ctx.field_grid) if wanted[1] else None,
            None,
        )


class _Decoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, filters: Tensor, field_grid: FieldGrid) -> Tensor:
        ctx.field_grid = field_grid
        ctx.save_for_backward(values, filters)
        maps = filters.shape[5]
        if 0 in field_grid.positions:
            return values.new_zeros(*field_grid.size, maps, values.shape[3])
        in_place = field_grid.stride == (1, 1) and _has_long_rows(values, field_grid) and maps * 4 >= SHORTEST_RUN
        implementation = fields_in_place if in_place else fields_copied
        return implementation.decoded(values.contiguous(), filters.contiguous(), field_grid)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, filters = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            outputs(gradients[0], filters, ctx.field_grid) if wanted[0] else None,
            filters_of(gradients[0], values, ctx.field_grid) if wanted[1] else None,
            None,
        )


class _Filters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, values: Tensor, field_grid: FieldGrid) -> Tensor:
        ctx.field_grid = field_grid
        ctx.save_for_backward(image, values)
        filters = image.new_empty(*field_grid.positions, values.shape[2], *field_grid.kernel, image.shape[2])
        if filters.shape[0] and filters.shape[1]:
            put_filters(filters, image, values, field_grid)
        return filters

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        image, values = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            decoded(values, gradients[0], ctx.field_grid) if wanted[0] else None,
            outputs(image, gradients[0], ctx.field_grid) if wanted[1] else None,
            None,
        )


def _has_long_rows(image: Tensor, field_grid: FieldGrid) -> bool:
    """Whether rows of fields are long enough for products without copies."""
    return image.shape[3] > 1 and field_grid.kernel[1] * image.shape[2] >= SHORTEST_RUN
