"""Subtractive-divisive normalisation of a region of an image, and its gradient: the computation of LocalContrastNorm2d.

A region is the image on one rank, or a rank's tile with its halo. `Blur` is the weighted mean around each pixel, with
which `contrast_of` computes mean and variance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.bounded_cache import cached_tensors
from torchmn.geometry import Interval
from torchmn.nn.local_filters.batch_last import empty_in_order_of, from_pixels, pixels, pixels_as

Pair = tuple[int, int]
Box = tuple[Interval, Interval]
MAPS = 2  # the dim of maps in (height, width, map, batch)


@dataclass(frozen=True)
class Normalisation:
    """The boxes of pixels and the weights of a normalisation.

    Each box contains the next one and half a window around it, as far as there is an image. Beyond are zeros.

    Attributes:
        inputs: the pixels that are needed.
        centred: those from which the mean is subtracted.
        outputs: those that are normalised.
        weights: of the window along height and width.
        threshold: see `LocalContrastNorm2d`.
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
        """Returns the normalisation of a box of outputs, in an image of `size`."""
        halves = len(weights[0]) // 2, len(weights[1]) // 2
        centred = _around(outputs, halves, size)
        return Normalisation(_around(centred, halves, size), centred, outputs, weights, threshold)

    @property
    def mean(self) -> Blur:
        """The blur from inputs to centred pixels."""
        return self._blur(self.inputs, self.centred)

    @property
    def variance(self) -> Blur:
        """The blur from centred pixels to outputs."""
        return self._blur(self.centred, self.outputs)

    def _blur(self, source: Box, target: Box) -> Blur:
        before = [t.start - len(row) // 2 - s.start for s, t, row in zip(source, target, self.weights, strict=True)]
        return Blur(self.weights, (before[0], before[1]), (len(target[0]), len(target[1])))


def normalised(x: Tensor, how: Normalisation) -> Tensor:
    """Returns (batch, map, *how.outputs) from x: (batch, map, *how.inputs), in the memory format of `x`."""
    return _Normalised.apply(x, how)


class Contrast(NamedTuple):
    """Intermediate results of a normalisation that its gradient needs.

    Attributes:
        centred: v, the pixels minus the mean around them.
        balance: the sum of v over maps.
        scale: the factor of each output pixel.
        steepness: the same, with 0 where there is no contrast.
    """

    centred: Tensor
    balance: Tensor
    scale: Tensor
    steepness: Tensor


def contrast_of(x: Tensor, how: Normalisation) -> tuple[Tensor, Contrast]:
    """Returns the outputs, (*how.outputs, map, batch), from x: (*how.inputs, map, batch), and intermediate results."""
    # The window is the same for all maps, so maps are summed first and only one is blurred.
    total = x.sum(MAPS, keepdim=True)
    mean = blurred(total, how.mean)
    centred = _inside(x, how.inputs, how.centred) - mean
    balance = torch.sub(_inside(total, how.inputs, how.centred), mean, alpha=x.shape[MAPS])
    variance = blurred((centred * centred).sum(MAPS, keepdim=True), how.variance)
    flat = how.threshold**2
    scale = torch.threshold(variance, flat, 1.0).rsqrt()
    steepness = torch.threshold(variance, flat, torch.inf).rsqrt()
    return _inside(centred, how.centred, how.outputs) * scale, Contrast(centred, balance, scale, steepness)


def gradient_of_contrast(g: Tensor, seen: Contrast, how: Normalisation) -> Tensor:
    """Returns the gradient of the inputs from `g`, the gradient of the outputs. Not differentiable."""
    # y = v·s with s = (blurred Σ v²)^-½ and v = x - blurred Σ x, sums over maps.
    centred, balance, scale, steepness = seen
    slope = (g * _inside(centred, how.centred, how.outputs)).sum(MAPS, keepdim=True)
    slope.mul_(steepness).mul_(steepness).mul_(steepness).neg_()
    by_scale = blurred(slope, how.variance.adjoint((centred.shape[0], centred.shape[1])))
    # The gradient of v is v·by_scale + g·s. Its sum over maps is computed without it, which saves one temporary image.
    by_centred = balance * by_scale
    _inside(by_centred, how.centred, how.outputs).addcmul_(g.sum(MAPS, keepdim=True), scale)
    shared = blurred(by_centred, how.mean.adjoint((len(how.inputs[0]), len(how.inputs[1])))).neg_()
    if how.inputs == how.centred:
        total = torch.addcmul(shared, centred, by_scale)
    else:
        total = empty_in_order_of(centred, (*shared.shape[:2], *centred.shape[2:]))
        middle = _inside(total, how.inputs, how.centred)
        torch.addcmul(_inside(shared, how.inputs, how.centred), centred, by_scale, out=middle)
        for strip in _outside(how.inputs, how.centred):
            total[strip] = shared[strip]
    _inside(total, how.inputs, how.outputs).addcmul_(g, scale)
    return total


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Normalisation) -> Tensor:
        ctx.how = how
        y, seen = contrast_of(pixels(x), how)
        ctx.save_for_backward(x, *seen)
        return from_pixels(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        x, *seen = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the formulas as differentiable torch functions
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = from_pixels(contrast_of(pixels(x), ctx.how)[0])
            return torch.autograd.grad(y, x, gradients[0], create_graph=True)[0], None
        return from_pixels(gradient_of_contrast(pixels_as(gradients[0], x), Contrast(*seen), ctx.how)), None


class Blur(NamedTuple):
    """A separable weighted mean around each pixel. Pixels beyond the inputs count as zeros.

    Attributes:
        weights: of the window along height and along width.
        before: index of the first pixel of the first window; negative if it is before the first pixel.
        size: number of outputs along height and width.
    """

    weights: tuple[tuple[float, ...], tuple[float, ...]]
    before: Pair
    size: Pair

    def adjoint(self, size: Pair) -> Blur:
        """Returns the transposed blur, whose outputs are the inputs of this one, of `size`."""
        rows, columns = self.weights
        before = 1 - len(rows) - self.before[0], 1 - len(columns) - self.before[1]
        return Blur((rows[::-1], columns[::-1]), before, size)


def blurred(x: Tensor, blur: Blur) -> Tensor:
    """Returns (*blur.size, ...) from x: (height, width, ...). Differentiable to any order."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Blurred.apply(x, blur)
    return _blurred(x, blur)


class _Blurred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blur: Blur) -> Tensor:
        ctx.adjoint = blur.adjoint((x.shape[0], x.shape[1]))
        return _blurred(x, blur)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return blurred(gradients[0], ctx.adjoint), None


def _blurred(x: Tensor, blur: Blur) -> Tensor:
    height, width, *rest = x.shape
    down, across = (
        _matrix(blur.weights[dim], blur.before[dim], blur.size[dim], x.shape[dim], x.dtype, x.device) for dim in (0, 1)
    )
    rows = torch.mm(down, x.reshape(height, -1)).view(blur.size[0], width, -1)
    return torch.bmm(across.expand(blur.size[0], -1, -1), rows).view(*blur.size, *rest)


# Two products with banded matrices need fewer calls than sums of shifted images, and calls dominate for small maps.
@cached_tensors(64 << 20)
def _matrix(
    weights: tuple[float, ...], before: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns (outputs, inputs): the weights of each output's window along one dim."""
    matrix = torch.zeros(outputs, inputs, dtype=torch.float64, device="cpu")
    for at, weight in enumerate(weights):
        matrix.diagonal(before + at).fill_(weight)
    return matrix.to(device, dtype)


def _around(box: Box, halves: Pair, size: Pair) -> Box:
    rows, columns = (
        Interval(max(0, one.start - half), min(extent, one.stop + half))
        for one, half, extent in zip(box, halves, size, strict=True)
    )
    return rows, columns


def _inside(x: Tensor, box: Box, inner: Box) -> Tensor:
    """Returns the pixels `inner` of an image (height, width, map, batch) that holds the pixels `box`."""
    for dim, (outside, inside) in enumerate(zip(box, inner, strict=True)):
        if outside != inside:
            x = x.narrow(dim, inside.start - outside.start, len(inside))
    return x


def _outside(box: Box, inner: Box) -> list[tuple[slice, slice]]:
    """Returns the slices of an image of `box` that are outside of `inner`: strips that do not overlap."""
    rows, columns = (inside.shift(-outside.start) for outside, inside in zip(box, inner, strict=True))
    every_column = slice(None)
    return [
        (slice(0, rows.start), every_column),
        (slice(rows.stop, len(box[0])), every_column),
        (rows.as_slice(), slice(0, columns.start)),
        (rows.as_slice(), slice(columns.stop, len(box[1]))),
    ]
