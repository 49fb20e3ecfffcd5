"""A weighted mean around each pixel of a map, row by row and column by column, for any region of an image."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        return Blur((self.weights[0][::-1], self.weights[1][::-1]), before, size)  # type: ignore[arg-type]


def blurred(x: Tensor, blur: Blur) -> Tensor:
    """(*blur.size, ...) from x: (height, width, ...). Differentiable to any order."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Blurred.apply(x, blur)  # type: ignore[return-value]
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
    for dim in (0, 1):
        x = _along(x, dim, blur.weights[dim], blur.before[dim], blur.size[dim])
    return x


def _along(x: Tensor, dim: int, weights: tuple[float, ...], before: int, size: int) -> Tensor:
    y = x.new_zeros(*x.shape[:dim], size, *x.shape[dim + 1 :])
    for at, weight in enumerate(weights):
        shift = before + at
        first, last = max(0, -shift), min(size, x.shape[dim] - shift)
        if first < last:
            y.narrow(dim, first, last - first).add_(x.narrow(dim, first + shift, last - first), alpha=weight)
    return y
