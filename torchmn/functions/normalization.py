"""Batch normalisation with the statistics of several ranks, as a differentiable function."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.uncompiled import uncompiled
from torchmn.functions.moments import Moments, channel_shape, dims_but_channel


@torch.no_grad()
def track_statistics(running_mean: Tensor, running_var: Tensor, moments: Moments, factor: float) -> None:
    """Move running statistics by `factor` towards those of a batch, unless that is empty."""
    if moments.count == 0:
        return
    for running, now in ((running_mean, moments.mean), (running_var, moments.unbiased_variance)):
        running.copy_(running.double().mul_(1 - factor).add_(now, alpha=factor))


@uncompiled
def normalize_over_ranks(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Moments, eps: float, comm: Communicator
) -> Tensor:
    """`x` normalised with the moments of all ranks' x, whose gradients are summed over the ranks of `comm`."""
    wide = accumulator(x.dtype)
    statistics = moments.mean.to(wide), moments.variance.to(wide), moments.count
    return _Normalize.apply(x, weight, bias, *statistics, eps, comm)  # type: ignore[return-value]


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, where mean and variance are functions of all ranks' x."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, variance, count, eps, comm):
        inverse_std = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse_std)
        ctx.count, ctx.comm = count, comm
        scale = inverse_std if weight is None else inverse_std * weight.to(mean.dtype)
        # The mean comes off first: x * scale - mean * scale would cancel digits where the mean is large.
        shape = channel_shape(x)
        y = (x.to(mean.dtype) - mean.view(shape)).mul_(scale.view(shape))
        return (y if bias is None else y.add_(bias.to(mean.dtype).view(shape))).to(x.dtype)

    @staticmethod
    @once_differentiable
    @uncompiled
    def backward(ctx, *gradients: Tensor):
        x, weight, mean, inverse_std = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dy, dims, shape = gradients[0].to(mean.dtype), dims_but_channel(x), channel_shape(x)
        distance = x.to(mean.dtype) - mean.view(shape)
        sum_dy, sum_dy_distance = dy.sum(dims), (dy * distance).sum(dims)
        dx = None
        if wants_x:
            # Mean and variance depend on every rank's x, so every rank's loss sends gradient through them.
            sums = ctx.comm.allreduce(torch.cat([sum_dy, sum_dy_distance]).double()) / max(ctx.count, 1)
            mean_dy, mean_dy_distance = sums.to(mean.dtype).chunk(2)
            slope = mean_dy_distance * inverse_std.square()
            scale = inverse_std if weight is None else inverse_std * weight.to(mean.dtype)
            dx = distance.mul_(-slope.view(shape)).add_(dy).sub_(mean_dy.view(shape))
            dx = dx.mul_(scale.view(shape)).to(x.dtype)
        d_weight = sum_dy_distance * inverse_std if wants_weight else None
        return dx, d_weight, sum_dy if wants_bias else None, None, None, None, None, None


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of `dtype` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
