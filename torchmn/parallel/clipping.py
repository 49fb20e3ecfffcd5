"""Clipping gradients of which ranks hold slices: by the norm of the whole, which is the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchmn.errors import ArgumentError
from torchmn.nn.parts.roles import replicas_of


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of `model`, which are scaled down so that it is at most `max_norm`. On every rank.

    As `torch.nn.utils.clip_grad_norm_`, also for the model that `parallelize` made: there ranks hold slices of some
    parameters, and torch's function would scale each rank's by a norm of its own. Call `optimizer.synchronize()`
    first: before it, gradients are a rank's shares.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"clip_grad_norm_: expected the model itself, not its parameters, got {type(model).__name__}"
        )
    if not norm_type > 0:
        raise ArgumentError(f"clip_grad_norm_: expected norm_type > 0, got {norm_type}")
    parallelism = getattr(model, "parallelism", None)
    gradients = [(p.grad, replicas_of(p) is not None) for p in model.parameters() if p.grad is not None]
    whole = _power([g for g, sliced in gradients if not sliced], norm_type)
    slices = _power([g for g, sliced in gradients if sliced], norm_type)
    if parallelism is not None and parallelism.grid.tiles.size > 1:
        slices = parallelism.grid.tiles.allreduce(slices, "max" if norm_type == float("inf") else "sum")
    norm = torch.maximum(whole, slices) if norm_type == float("inf") else (whole + slices) ** (1.0 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's formula
    for gradient, _ in gradients:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def _power(gradients: list[Tensor], norm_type: float) -> Tensor:
    """The sum of powers of all elements, or their largest; in double precision, so that the order does not show."""
    if norm_type == float("inf"):
        return max(
            (g.abs().max().double().cpu() for g in gradients if g.numel()), default=torch.zeros((), dtype=torch.float64)
        )
    return sum((g.abs().double().pow(norm_type).sum().cpu() for g in gradients), torch.zeros((), dtype=torch.float64))
