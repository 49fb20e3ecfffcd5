"""Mean and variance over several ranks, and batch normalisation with them.

Without the cancellation of digits of the formula E[x²] - E[x]².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchmn._torch_compat import Function
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled


@dataclass
class Moments:
    """Per channel: the number of values, their mean, and the sum of their squared deviations from it. Float64."""

    count: float
    mean: Tensor
    squares: Tensor

    def packed(self) -> Tensor:
        """Returns all three as one flat tensor, for one message."""
        return torch.cat([self.mean.new_tensor([self.count]), self.mean, self.squares])

    @staticmethod
    def unpacked(flat: Tensor) -> Moments:
        """Returns the moments of which `packed` made a flat tensor."""
        mean, squares = flat[1:].chunk(2)
        return Moments(float(flat[0]), mean, squares)

    @property
    def variance(self) -> Tensor:
        """The biased variance, by which a batch is normalised."""
        return self.squares / max(self.count, 1)

    @property
    def unbiased_variance(self) -> Tensor:
        """The unbiased variance, for the running variance."""
        return self.squares / max(self.count - 1, 1)


def dims_but_channel(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def channel_shape(x: Tensor) -> tuple[int, ...]:
    """Returns the shape in which one value per channel broadcasts against `x`."""
    return (1, -1, *[1] * (x.dim() - 2))


def local_moments(x: Tensor) -> Moments:
    """Returns the moments of each channel of `x`: (batch, channel, ...), floating-point, possibly empty."""
    channels = x.shape[1]
    if x.numel() == 0:
        zeros = torch.zeros(channels, dtype=torch.float64, device=x.device)
        return Moments(0, zeros, zeros)
    dims = dims_but_channel(x)
    # The corrected two-pass algorithm: the second pass measures the rounding error of the first mean, which is then
    # subtracted from both results.
    rounded = x.mean(dims)
    distance = x - rounded.view(channel_shape(x))
    error = distance.mean(dims).double()
    count = x.numel() // channels
    squares = distance.square_().sum(dims).double() - count * error.square()
    return Moments(count, rounded.double() + error, squares.clamp_(min=0))


def union(parts: list[Moments]) -> Moments:
    """Returns the moments of all values together, by Chan's formula."""
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
    """Updates running statistics by those of a batch with momentum `factor`, unless the batch is empty."""
    if moments.count == 0:
        return
    for running, now in ((running_mean, moments.mean), (running_var, moments.unbiased_variance)):
        running.copy_(running.double().mul_(1 - factor).add_(now, alpha=factor))


@uncompiled
def normalize_over_ranks(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Moments, eps: float, comm: Communicator
) -> Tensor:
    """Returns `x` normalised with the moments of all ranks' x. Differentiable: backward sums over the ranks.

    Args:
        x: (batch, channel, ...), this rank's samples.
        weight: (channel,) or None.
        bias: (channel,) or None.
        moments: of all ranks' x, see `union`.
        eps: added to the variance.
        comm: communicator of these ranks; all of them must call.
    """
    wide = accumulator(x.dtype)
    statistics = moments.mean.to(wide), moments.variance.to(wide), moments.count
    return _Normalize.apply(x, weight, bias, *statistics, eps, comm)


class _Normalize(Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, where mean and variance are functions of all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: float,
        eps: float,
        comm: Communicator,
    ) -> Tensor:
        inverse_std = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse_std)
        ctx.count, ctx.comm = count, comm
        scale = inverse_std if weight is None else inverse_std * weight.to(mean.dtype)
        # Subtract the mean first: x * scale - mean * scale would cancel digits if the mean is large.
        shape = channel_shape(x)
        y = (x.to(mean.dtype) - mean.view(shape)).mul_(scale.view(shape))
        return (y if bias is None else y.add_(bias.to(mean.dtype).view(shape))).to(x.dtype)

    @staticmethod
    @once_differentiable
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x: Tensor
        x, weight, mean, inverse_std = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dy, dims, shape = gradients[0].to(mean.dtype), dims_but_channel(x), channel_shape(x)
        distance = x.to(mean.dtype) - mean.view(shape)
        sum_dy, sum_dy_distance = dy.sum(dims), (dy * distance).sum(dims)
        dx = None
        if wants_x:
            # Mean and variance depend on the x of all ranks, so gradients of all ranks' losses flow through them.
            sums = ctx.comm.allreduce(torch.cat([sum_dy, sum_dy_distance]).double()) / max(ctx.count, 1)
            mean_dy, mean_dy_distance = sums.to(mean.dtype).chunk(2)
            slope = mean_dy_distance * inverse_std.square()
            scale = inverse_std if weight is None else inverse_std * weight.to(mean.dtype)
            dx = distance.mul_(-slope.view(shape)).add_(dy).sub_(mean_dy.view(shape))
            dx = dx.mul_(scale.view(shape)).to(x.dtype)
        d_weight = sum_dy_distance * inverse_std if wants_weight else None
        return dx, d_weight, sum_dy if wants_bias else None, None, None, None, None, None


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which statistics of `dtype` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
