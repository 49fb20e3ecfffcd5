"""A stack's features on a tile as one operation: filters, exchange, pooling, normalisation, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.geometry import HaloPlan
from torchmn.models.sparse_autoencoder.overlapped_outputs import TravellingOutputs, gradients_of_own
from torchmn.nn.local_filters.batch_last import batch_last, from_pixels, halo_of, pixels
from torchmn.nn.local_filters.contrast_region import (
    Contrast,
    Normalisation,
    contrast_of,
    gradient_of_contrast,
    normalised,
)
from torchmn.nn.local_filters.l2_pool import gradient_of_norms, norms_of, pooled
from torchmn.nn.local_filters.local_filter import by_pixel, from_by_pixel
from torchmn.nn.local_filters.receptive_fields import decoded, outputs
from torchmn.nn.local_filters.tiling import Tiling
from torchmn.nn.local_filters.window_sums import Windows


@dataclass(frozen=True)
class TileSteps:
    """Pooling and normalisation of a tile: which filters' outputs they need, and what each makes of them."""

    plan: HaloPlan
    windows: Windows
    norm: Normalisation


def tile_features(
    x: Tensor, weight: Tensor, tiling: Tiling, eps: float, steps: TileSteps, comm: Communicator
) -> Tensor:
    """(batch, map, *steps.norm.outputs), in memory with the batch last, as is `x`: what this rank's filters see.

    weight: this rank's filters; eps: of pooling. Differentiable to any order; all ranks of `comm` must run it.
    """
    return _Features.apply(x, weight, tiling, eps, steps, comm)  # type: ignore[return-value]


# One operation, so that memory which nobody else can see is written in place: outputs among their neighbours', and
# gradients that neighbours add to.
class _Features(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, tiling: Tiling, eps: float, steps: TileSteps, comm: Communicator
    ) -> Tensor:
        ctx.settings = tiling, eps, steps, comm
        wants_gradient = any(ctx.needs_input_grad)
        y = TravellingOutputs(pixels(x), by_pixel(weight), tiling, steps.plan, comm, wants_gradient).with_halo()
        norms = norms_of(y, steps.windows, eps)
        features, contrast = contrast_of(norms, steps.norm)
        ctx.save_for_backward(x, weight, y, norms, *contrast)
        return from_pixels(features)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, weight, y, norms, *contrast = ctx.saved_tensors
        tiling, _, steps, comm = ctx.settings
        if torch.is_grad_enabled():  # second derivatives are wanted
            return *_gradients_in_steps(ctx, x, weight, gradients[0]), None, None, None, None
        g = gradient_of_contrast(batch_last(gradients[0]), Contrast(*contrast), steps.norm)
        g = gradient_of_norms(g, y, norms, steps.windows)
        own, filters = gradients_of_own(g, pixels(x), tiling, steps.plan, comm)
        below = from_pixels(decoded(own, by_pixel(weight), tiling)) if ctx.needs_input_grad[0] else None
        return below, from_by_pixel(filters), None, None, None, None


def in_steps(x: Tensor, weight: Tensor, tiling: Tiling, eps: float, steps: TileSteps, comm: Communicator) -> Tensor:
    """`tile_features`, one operation after the other."""
    y = halo_of(from_pixels(outputs(pixels(x), by_pixel(weight), tiling)), steps.plan, comm)
    return normalised(pooled(y, steps.windows, eps), steps.norm)


def _gradients_in_steps(ctx: Any, x: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `x` and `weight`, those that are needed, with a graph of their own."""
    x, weight = (one if one.requires_grad else one.detach().requires_grad_() for one in (x, weight))
    by_x, by_weight = torch.autograd.grad(in_steps(x, weight, *ctx.settings), (x, weight), g, create_graph=True)
    return by_x if ctx.needs_input_grad[0] else None, by_weight if ctx.needs_input_grad[1] else None
