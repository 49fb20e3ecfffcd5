"""Sums over all windows of an image, and the adjoint, which spreads values over windows.

Each is the gradient of the other, so both are differentiable to any order. They add shifted images, row by row and
column by column, which is several times as fast as torch's average pools. A sum of squares is zero exactly where all
squares are zero. Images are (height, width, ...), in any memory format; results have the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.nn.local_filters.batch_last import empty_in_order_of


class Windows(NamedTuple):
    """The windows of an image.

    Attributes:
        size: (height, width) of the image, including its padding.
        kernel: (height, width) of a window.
        stride: distance between windows along height and width.
    """

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]

    def along(self, dim: int, at: int) -> tuple[slice, ...]:
        """Returns the index of the pixels at position `at` of all windows along height (0) or width (1)."""
        count = (self.size[dim] - self.kernel[dim]) // self.stride[dim] + 1
        pixels = slice(at, at + (count - 1) * self.stride[dim] + 1, self.stride[dim])
        return (slice(None), pixels) if dim else (pixels,)


def window_sums(image: Tensor, windows: Windows) -> Tensor:
    """Returns the sum of each window that is fully inside the image: (out_height, out_width, ...)."""
    return _Sums.apply(image, windows) if _needs_graph(image) else _sums(image, windows)


def spread_over_windows(sums: Tensor, windows: Windows) -> Tensor:
    """Returns the image in which every pixel is the sum of the values of all windows that contain it."""
    return _Spread.apply(sums, windows) if _needs_graph(sums) else _spread(sums, windows)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, windows: Windows) -> Tensor:
        ctx.windows = windows
        return _sums(image, windows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return spread_over_windows(gradients[0], ctx.windows), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, windows: Windows) -> Tensor:
        ctx.windows = windows
        return _spread(sums, windows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return window_sums(gradients[0], ctx.windows), None


def sums_of_squares(image: Tensor, windows: Windows) -> Tensor:
    """Returns `window_sums` of the squares of all pixels. Not differentiable."""
    first, *others = (image[windows.along(0, at)] for at in range(windows.kernel[0]))
    squares = first * first
    for more in others:
        squares.addcmul_(more, more)
    return _sums_along(1, squares, windows)


def _sums(image: Tensor, windows: Windows) -> Tensor:
    return _sums_along(1, _sums_along(0, image, windows), windows)


def _sums_along(dim: int, image: Tensor, windows: Windows) -> Tensor:
    shifted = [image[windows.along(dim, at)] for at in range(windows.kernel[dim])]
    sums = shifted[0] + shifted[1] if len(shifted) > 1 else shifted[0].clone()
    for more in shifted[2:]:
        sums.add_(more)
    return sums


def _spread(sums: Tensor, windows: Windows) -> Tensor:
    field, inside = room_for_spreading(sums, windows)
    inside.copy_(sums)
    return spread_of(field, windows)


def room_for_spreading(like: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Returns the buffer that `spread_of` needs, and a view of it for the values, of the shape of `like`."""
    before = [k - 1 for k in windows.kernel]
    size = windows.size[0] + before[0], windows.size[1] + before[1]
    field = empty_in_order_of(like, (*size, *like.shape[2:]))
    rows, columns = (
        slice(start, start + (count - 1) * stride + 1, stride)
        for start, count, stride in zip(before, like.shape[:2], windows.stride, strict=True)
    )
    if windows.stride == (1, 1):  # all other elements will be overwritten
        for border in (
            field[: rows.start],
            field[rows.stop :],
            field[rows, : columns.start],
            field[rows, columns.stop :],
        ):
            border.zero_()
    else:
        field.zero_()
    return field, field[rows, columns]


def spread_of(field: Tensor, windows: Windows) -> Tensor:
    """Returns `spread_over_windows` of values in a buffer of `room_for_spreading`. Not differentiable."""
    # In a buffer with zeros around the values, the windows that contain a pixel form a window of the buffer.
    return _sums(field, Windows((field.shape[0], field.shape[1]), windows.kernel, (1, 1)))


def _needs_graph(x: Tensor) -> bool:
    """Whether autograd must record a function; if not, the call without an autograd.Function is faster."""
    return x.requires_grad and torch.is_grad_enabled()
