"""Mean and variance of values that lie on several ranks, without the loss of digits that E[x²] - E[x]² has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
