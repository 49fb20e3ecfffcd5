"""The sums of all windows of an image, and the image that is the sum of windows of equal values.

The two are each other's adjoint, so that each is the other's gradient, to any order. They add shifted images, row by
row and column by column, which is several times as fast as torch's average pools. A sum of squares is zero exactly
where all squares are. Images are (any, height, width, any): see `batch_last.planes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """Which windows of an image: of `kernel`, every `stride`-th, in an image of `size` that contains its padding."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]

    def along(self, dim: int, at: int) -> tuple[slice, ...]:
        """Along height (0) or width (1), the pixels at place `at` of all windows."""
        count = (self.size[dim] - self.kernel[dim]) // self.stride[dim] + 1
        pixels = slice(at, at + (count - 1) * self.stride[dim] + 1, self.stride[dim])
        return (slice(None), slice(None), pixels) if dim else (slice(None), pixels)


def window_sums(image: Tensor, windows: Windows) -> Tensor:
    """The sum of each window that lies fully in the image: (any, out_height, out_width, any)."""
    return _Sums.apply(image, windows)  # type: ignore[return-value]


def spread_over_windows(sums: Tensor, windows: Windows) -> Tensor:
    """The image in which every pixel is the sum of the values of all windows that it lies in."""
    return _Spread.apply(sums, windows)  # type: ignore[return-value]


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, windows: Windows) -> Tensor:
        ctx.windows = windows
        sums = image
        for dim in (1, 0):
            shifted = [sums[windows.along(dim, at)] for at in range(windows.kernel[dim])]
            sums = shifted[0] + shifted[1] if len(shifted) > 1 else shifted[0].clone()
            for more in shifted[2:]:
                sums.add_(more)
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return spread_over_windows(gradients[0], ctx.windows), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, windows: Windows) -> Tensor:
        ctx.windows = windows
        height, width = windows.size
        rows = sums.new_zeros(sums.shape[0], height, *sums.shape[2:])
        for at in range(windows.kernel[0]):
            rows[windows.along(0, at)].add_(sums)
        image = sums.new_zeros(*rows.shape[:2], width, sums.shape[3])
        for at in range(windows.kernel[1]):
            image[windows.along(1, at)].add_(rows)
        return image

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return window_sums(gradients[0], ctx.windows), None
