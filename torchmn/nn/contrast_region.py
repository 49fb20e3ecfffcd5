"""Subtractive and divisive normalisation of a region of an image, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmn.geometry import Interval
from torchmn.nn.batch_last import from_pixels, pixels, pixels_as
from torchmn.nn.gaussian_blur import Blur, blurred

Box = tuple[Interval, Interval]
Pair = tuple[int, int]

MAPS = 2  # the dim of maps in (height, width, map, batch)


@dataclass(frozen=True)
class Normalisation:
    """Which rows and columns of the image come in, are centred and come out, and with which weights around each.

    Each of them surrounds the next by half a window, as far as the image reaches: beyond it lie zeros.
    """

    inputs: Box
    centred: Box
    outputs: Box
    weights: tuple[tuple[float, ...], tuple[float, ...]]
    threshold: float = 0.0

    @staticmethod
    def of(
        size: Pair, outputs: Box, weights: tuple[tuple[float, ...], tuple[float, ...]], threshold: float
    ) -> Normalisation:
        """What a box of outputs of an image of `size` takes."""
        halves = len(weights[0]) // 2, len(weights[1]) // 2
        centred = _around(outputs, halves, size)
        return Normalisation(_around(centred, halves, size), centred, outputs, weights, threshold)

    @property
    def mean(self) -> Blur:
        return self._blur(self.inputs, self.centred)

    @property
    def variance(self) -> Blur:
        return self._blur(self.centred, self.outputs)

    def _blur(self, source: Box, target: Box) -> Blur:
        before = [t.start - len(row) // 2 - s.start for s, t, row in zip(source, target, self.weights, strict=True)]
        return Blur(self.weights, (before[0], before[1]), (len(target[0]), len(target[1])))


def normalised(x: Tensor, how: Normalisation) -> Tensor:
    """The outputs, (batch, map, *how.outputs), from x: (batch, map, *how.inputs), in the same order in memory."""
    return _Normalised.apply(x, how)  # type: ignore[return-value]


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Normalisation) -> Tensor:
        ctx.how = how
        centred, scale, flat = _parts(pixels(x), how)
        ctx.save_for_backward(x, centred, scale, flat)
        return from_pixels(_inside(centred, how.centred, how.outputs) * scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        x, centred, scale, flat = ctx.saved_tensors
        how, g = ctx.how, pixels_as(gradients[0], x)
        if torch.is_grad_enabled():  # second derivatives are wanted: the formulas, by torch's own rules
            x = x if x.requires_grad else x.detach().requires_grad_()
            again, scale, _ = _parts(pixels(x), how)
            y = from_pixels(_inside(again, how.centred, how.outputs) * scale)
            return torch.autograd.grad(y, x, gradients[0], create_graph=True)[0], None
        # y = v·s with s = (blurred Σ v²)^-½ and v = x - blurred Σ x: the sums are over maps
        slope = (g * _inside(centred, how.centred, how.outputs)).sum(MAPS, keepdim=True)
        slope.mul_(scale).mul_(scale).mul_(scale).neg_().masked_fill_(flat, 0)
        total = centred * blurred(slope, how.variance.adjoint((centred.shape[0], centred.shape[1])))
        _inside(total, how.centred, how.outputs).addcmul_(g, scale)
        size = x.shape[2], x.shape[3]
        shared = blurred(total.sum(MAPS, keepdim=True), how.mean.adjoint(size)).neg_()
        if how.inputs == how.centred:
            total += shared
        else:
            own, total = total, shared.expand(*size, x.shape[1], x.shape[0]).contiguous()
            _inside(total, how.inputs, how.centred).add_(own)
        return from_pixels(total), None


def _parts(x: Tensor, how: Normalisation) -> tuple[Tensor, Tensor, Tensor]:
    """The centred pixels, the factor of each output pixel, and where there is no contrast.

    x: (height, width, map, batch), in any order in memory
    """
    # The window is the same for all maps: summed first, there is one map to blur.
    centred = _inside(x, how.inputs, how.centred) - blurred(x.sum(MAPS, keepdim=True), how.mean)
    variance = blurred((centred * centred).sum(MAPS, keepdim=True), how.variance)
    flat = variance <= how.threshold**2
    return centred, torch.rsqrt(variance.masked_fill(flat, 1.0)), flat


def _around(box: Box, halves: Pair, size: Pair) -> Box:
    rows, columns = (
        Interval(max(0, one.start - half), min(extent, one.stop + half))
        for one, half, extent in zip(box, halves, size, strict=True)
    )
    return rows, columns


def _inside(x: Tensor, box: Box, inner: Box) -> Tensor:
    """The pixels of `inner` of an image, (height, width, map, batch), that holds those of `box`."""
    for dim, (outside, inside) in enumerate(zip(box, inner, strict=True)):
        if outside != inside:
            x = x.narrow(dim, inside.start - outside.start, len(inside))
    return x
