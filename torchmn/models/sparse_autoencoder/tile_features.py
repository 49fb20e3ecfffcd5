"""tile_features: filters, halo exchange, pooling and normalisation of a tile as one autograd function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.geometry import HaloPlan
from torchmn.models.sparse_autoencoder.overlapped_outputs import OverlappedOutputs, gradients_of_owned
from torchmn.nn.local_filters.batch_last import batch_last, from_pixels, halo_of, pixels
from torchmn.nn.local_filters.contrast_region import (
    Contrast,
    Normalisation,
    contrast_of,
    gradient_of_contrast,
    normalised,
)
from torchmn.nn.local_filters.field_grid import FieldGrid
from torchmn.nn.local_filters.l2_pool import gradient_of_norms, norms_of, pooled
from torchmn.nn.local_filters.local_filter import by_pixel, from_by_pixel
from torchmn.nn.local_filters.receptive_fields import decoded, outputs
from torchmn.nn.local_filters.window_sums import Windows


@dataclass(frozen=True)
class TileSteps:
    """The integers of pooling and normalisation on a tile.

    Attributes:
        plan: the halo plan of the filters' outputs that they need.
        windows: of the pooling.
        norm: the region that is normalised.
    """

    plan: HaloPlan
    windows: Windows
    norm: Normalisation


def tile_features(
    x: Tensor, weight: Tensor, field_grid: FieldGrid, eps: float, steps: TileSteps, comm: Communicator
) -> Tensor:
    """Returns the features of a tile, (batch, map, *steps.norm.outputs), in memory with the batch last.

    Differentiable to any order. All ranks of `comm` must call it, and run its backward.

    Args:
        x: (batch, map, height, width), the inputs of this rank's filters, with halo, in memory with the batch last.
        weight: this rank's filters.
        field_grid: the positions of the filters.
        eps: of the pooling.
        steps: pooling and normalisation.
        comm: the ranks of the tiles.
    """
    return _Features.apply(x, weight, field_grid, eps, steps, comm)


# One autograd function, so that buffers can be changed in place: outputs are written into the buffer with the halo, and
# contributions of neighbours are added to gradients.
class _Features(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, field_grid: FieldGrid, eps: float, steps: TileSteps, comm: Communicator
    ) -> Tensor:
        ctx.settings = field_grid, eps, steps, comm
        wants_gradient = any(ctx.needs_input_grad)
        y = OverlappedOutputs(pixels(x), by_pixel(weight), field_grid, steps.plan, comm, wants_gradient).with_halo()
        norms = norms_of(y, steps.windows, eps)
        features, contrast = contrast_of(norms, steps.norm)
        ctx.save_for_backward(x, weight, y, norms, *contrast)
        return from_pixels(features)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, weight, y, norms, *contrast = ctx.saved_tensors
        field_grid, _, steps, comm = ctx.settings
        if torch.is_grad_enabled():  # create_graph=True
            return *_gradients_in_steps(ctx, x, weight, gradients[0]), None, None, None, None
        g = gradient_of_contrast(batch_last(gradients[0]), Contrast(*contrast), steps.norm)
        g = gradient_of_norms(g, y, norms, steps.windows)
        owned, filters = gradients_of_owned(g, pixels(x), field_grid, steps.plan, comm)
        below = from_pixels(decoded(owned, by_pixel(weight), field_grid)) if ctx.needs_input_grad[0] else None
        return below, from_by_pixel(filters), None, None, None, None


def in_steps(
    x: Tensor, weight: Tensor, field_grid: FieldGrid, eps: float, steps: TileSteps, comm: Communicator
) -> Tensor:
    """Returns `tile_features`, computed by separate differentiable functions."""
    y = halo_of(from_pixels(outputs(pixels(x), by_pixel(weight), field_grid)), steps.plan, comm)
    return normalised(pooled(y, steps.windows, eps), steps.norm)


def _gradients_in_steps(ctx: Any, x: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of `x` and `weight`, as far as they are needed, with a graph."""
    x, weight = (one if one.requires_grad else one.detach().requires_grad_() for one in (x, weight))
    by_x, by_weight = torch.autograd.grad(in_steps(x, weight, *ctx.settings), (x, weight), g, create_graph=True)
    return by_x if ctx.needs_input_grad[0] else None, by_weight if ctx.needs_input_grad[1] else None
