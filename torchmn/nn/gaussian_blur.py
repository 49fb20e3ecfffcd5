"""A weighted mean around each pixel of a map, row by row and column by column, for any region of an image."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.communicators.bounded_cache import remembered_tensors

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
    height, width, *rest = x.shape
    down, across = (
        _matrix(blur.weights[dim], blur.before[dim], blur.size[dim], x.shape[dim], x.dtype, x.device) for dim in (0, 1)
    )
    rows = torch.mm(down, x.reshape(height, -1)).view(blur.size[0], width, -1)
    return torch.bmm(across.expand(blur.size[0], -1, -1), rows).view(*blur.size, *rest)


# Two products with matrices of mostly zeros are fewer calls than additions of shifted images, and calls are what a
# small map costs.
@remembered_tensors(64 << 20)
def _matrix(
    weights: tuple[float, ...], before: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(outputs, inputs): the weights of each output's window along one dim."""
    matrix = torch.zeros(outputs, inputs, dtype=torch.float64, device="cpu")
    for at, weight in enumerate(weights):
        matrix.diagonal(before + at).fill_(weight)
    return matrix.to(device, dtype)
