"""Subtractive and divisive normalisation of a region of an image, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.bounded_cache import cached_tensors
from torchmn.geometry import Interval
from torchmn.nn.local_filters.batch_last import from_pixels, pixels, pixels_as, empty_in_order_of

Pair = tuple[int, int]


class Blur(NamedTuple):
    """Weights along height and width, and which pixels come out.

    weights: of the pixels around each, along height and along width
    before: where the window of the first output begins, counted from the first pixel: negative if in front of it
    size: how many outputs there are along height and width

    Pixels that are not there count as zeros.
    """

    weights: tuple[tuple[float, ...], tuple[float, ...]]
    before: Pair
    size: Pair

    def adjoint(self, size: Pair) -> Blur:
        """The blur whose matrix is the transposed one, with outputs of `size`, the inputs of this one."""
        before = tuple(1 - len(row) - start for row, start in zip(self.weights, self.before, strict=True))
        return Blur((self.weights[0][::-1], self.weights[1][::-1]), before, size)


def blurred(x: Tensor, blur: Blur) -> Tensor:
    """(*blur.size, ...) from x: (height, width, ...). Differentiable to any order."""
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


# Two products with matrices of mostly zeros are fewer calls than additions of shifted images, and calls are what a
# small map costs.
@cached_tensors(64 << 20)
def _matrix(
    weights: tuple[float, ...], before: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(outputs, inputs): the weights of each output's window along one dim."""
    matrix = torch.zeros(outputs, inputs, dtype=torch.float64, device="cpu")
    for at, weight in enumerate(weights):
        matrix.diagonal(before + at).fill_(weight)
    return matrix.to(device, dtype)


Box = tuple[Interval, Interval]

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
    return _Normalised.apply(x, how)


class Contrast(NamedTuple):
    """What the gradient of a normalisation needs of it.

    centred: v, the pixels without the mean around them; balance: the sum of v over maps
    scale: the factor of each output pixel; steepness: the same, and 0 where there is no contrast
    """

    centred: Tensor
    balance: Tensor
    scale: Tensor
    steepness: Tensor


def contrast_of(x: Tensor, how: Normalisation) -> tuple[Tensor, Contrast]:
    """The outputs, (*how.outputs, map, batch), from x: (*how.inputs, map, batch), and what their gradient needs."""
    # The window is the same for all maps: summed first, there is one map to blur.
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
    """The gradient of the inputs, from `g`, that of the outputs. No autograd."""
    # y = v·s with s = (blurred Σ v²)^-½ and v = x - blurred Σ x: the sums are over maps
    centred, balance, scale, steepness = seen
    slope = (g * _inside(centred, how.centred, how.outputs)).sum(MAPS, keepdim=True)
    slope.mul_(steepness).mul_(steepness).mul_(steepness).neg_()
    by_scale = blurred(slope, how.variance.adjoint((centred.shape[0], centred.shape[1])))
    # The gradient of v is v·by_scale + g·s. Its sum over maps is known before it is, so x's can be written at once.
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
        if torch.is_grad_enabled():  # second derivatives are wanted: the formulas, by torch's own rules
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = from_pixels(contrast_of(pixels(x), ctx.how)[0])
            return torch.autograd.grad(y, x, gradients[0], create_graph=True)[0], None
        return from_pixels(gradient_of_contrast(pixels_as(gradients[0], x), Contrast(*seen), ctx.how)), None


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


def _outside(box: Box, inner: Box) -> list[tuple[slice, slice]]:
    """The strips of `box` around `inner`, as they lie in an image of `box`."""
    rows, columns = (inside.shift(-outside.start) for outside, inside in zip(box, inner, strict=True))
    every_column = slice(None)
    return [
        (slice(0, rows.start), every_column),
        (slice(rows.stop, len(box[0])), every_column),
        (rows.as_slice(), slice(0, columns.start)),
        (rows.as_slice(), slice(columns.stop, len(box[1]))),
    ]
