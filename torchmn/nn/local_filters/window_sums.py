"""The sums of all windows of an image, and the image that is the sum of windows of equal values.

The two are each other's adjoint, so that each is the other's gradient, to any order. They add shifted images, row by
row and column by column, which is several times as fast as torch's average pools. A sum of squares is zero exactly
where all squares are. Images are (height, width, ...), in any order in memory, and results are in the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.nn.local_filters.batch_last import room_in_order_of


class Windows(NamedTuple):
    """Which windows of an image: of `kernel`, every `stride`-th, in an image of `size` that contains its padding."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]

    def along(self, dim: int, at: int) -> tuple[slice, ...]:
        """Along height (0) or width (1), the pixels at place `at` of all windows."""
        count = (self.size[dim] - self.kernel[dim]) // self.stride[dim] + 1
        pixels = slice(at, at + (count - 1) * self.stride[dim] + 1, self.stride[dim])
        return (slice(None), pixels) if dim else (pixels,)


def window_sums(image: Tensor, windows: Windows) -> Tensor:
    """The sum of each window that lies fully in the image: (out_height, out_width, ...)."""
    return _Sums.apply(image, windows) if _is_watched(image) else _sums(image, windows)  # type: ignore[return-value]


def spread_over_windows(sums: Tensor, windows: Windows) -> Tensor:
    """The image in which every pixel is the sum of the values of all windows that it lies in."""
    return _Spread.apply(sums, windows) if _is_watched(sums) else _spread(sums, windows)  # type: ignore[return-value]


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
    """`window_sums` of the squares of all pixels. No autograd."""
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
    """The room that `spread_of` takes, and the view of it to write values of the shape of `like` into."""
    before = [k - 1 for k in windows.kernel]
    size = windows.size[0] + before[0], windows.size[1] + before[1]
    field = room_in_order_of(like, (*size, *like.shape[2:]))
    rows, columns = (
        slice(start, start + (count - 1) * stride + 1, stride)
        for start, count, stride in zip(before, like.shape[:2], windows.stride, strict=True)
    )
    if windows.stride == (1, 1):  # all else will be written
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
    """`spread_over_windows` of the values that were written into a field of `room_for_spreading`. No autograd."""
    # With zeros around, the windows in which a pixel lies are a window, too: the one that ends where theirs begin.
    return _sums(field, Windows((field.shape[0], field.shape[1]), windows.kernel, (1, 1)))


def _is_watched(x: Tensor) -> bool:
    """Whether autograd looks: if not, a call is the cheaper one without it."""
    return x.requires_grad and torch.is_grad_enabled()
