"""Mean and variance of values that lie on several ranks, without the loss of digits that E[x²] - E[x]² has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled


@dataclass
class Moments:
    """Of each channel: how many values, their mean, and the sum of their squared distances from it. Float64."""

    count: float
    mean: Tensor
    squares: Tensor

    def packed(self) -> Tensor:
        """All of it in one flat tensor, so that it travels as one message."""
        return torch.cat([self.mean.new_tensor([self.count]), self.mean, self.squares])

    @staticmethod
    def unpacked(flat: Tensor) -> Moments:
        mean, squares = flat[1:].chunk(2)
        return Moments(float(flat[0]), mean, squares)

    @property
    def variance(self) -> Tensor:
        """The biased variance: what a batch is normalised with."""
        return self.squares / max(self.count, 1)

    @property
    def unbiased_variance(self) -> Tensor:
        """What a running variance is made of."""
        return self.squares / max(self.count - 1, 1)


def dims_but_channel(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def channel_shape(x: Tensor) -> tuple[int, ...]:
    """The shape in which values, one per channel, broadcast against `x`."""
    return (1, -1, *[1] * (x.dim() - 2))


def local_moments(x: Tensor) -> Moments:
    """The moments of each channel of `x`: (batch, channel, ...), a floating-point tensor, empty ones too."""
    channels = x.shape[1]
    if x.numel() == 0:
        nothing = torch.zeros(channels, dtype=torch.float64, device=x.device)
        return Moments(0, nothing, nothing)
    dims = dims_but_channel(x)
    # The corrected two-pass algorithm: the rounding error of the first mean is measured by the second pass and
    # taken out of both results.
    rounded = x.mean(dims)
    distance = x - rounded.view(channel_shape(x))
    error = distance.mean(dims).double()
    count = x.numel() // channels
    squares = distance.square_().sum(dims).double() - count * error.square()
    return Moments(count, rounded.double() + error, squares.clamp_(min=0))


def union(parts: list[Moments]) -> Moments:
    """The moments of all values together, by Chan's formula: every part counts for as many values as it has."""
    count = 0
    for part in parts:
        count += part.count
    if count == 0:
        return parts[0]
    mean = squares = torch.zeros_like(parts[0].mean)
    for part in parts:
        mean = mean + part.mean * (part.count / count)
    for part in parts:
        squares = squares + (part.squares + part.count * (part.mean - mean).square())
    return Moments(count, mean, squares)


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
