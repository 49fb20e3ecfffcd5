"""L2Pool2d: pooling by the L2 norm of each window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import DisableTorchFunction
from torchmn.errors import ArgumentError
from torchmn.geometry import Window
from torchmn.nn.layers.halo_layer import HaloLayer
from torchmn.nn.local_filters.batch_last import from_pixels, pixels, pixels_as
from torchmn.nn.local_filters.image_sizes import Size, pair
from torchmn.nn.local_filters.window_sums import (
    Windows,
    room_for_spreading,
    spread_of,
    spread_over_windows,
    sums_of_squares,
)
from torchmn.sharded.tensor import ShardedTensor


class L2Pool2d(HaloLayer):
    """The square root of `eps` plus the sum of squares of each window, per map.

    The gradient is x / y inside a window, and zero where the window is all zero (`nn.LPPool2d` gives NaN there).
    Elements whose square underflows count as zero.

    Args:
        kernel: size of the window.
        stride: the kernel by default.
        eps: added to the sum of squares.
        padding: zeros around the image, at most half the kernel.

    Raises:
        ArgumentError: if an argument is wrong.
    """

    def __init__(self, kernel: Size, stride: Size | None = None, eps: float = 0.0, *, padding: Size = 0) -> None:
        super().__init__()
        self.kernel = pair("L2Pool2d", "kernel", kernel)
        self.stride = self.kernel if stride is None else pair("L2Pool2d", "stride", stride)
        self.padding = pair("L2Pool2d", "padding", padding, least=0)
        if any(2 * pad > extent for pad, extent in zip(self.padding, self.kernel, strict=True)):
            raise ArgumentError(
                f"L2Pool2d: expected padding of at most half the kernel {self.kernel}, got {self.padding}: "
                "a window must contain pixels"
            )
        if not eps >= 0:
            raise ArgumentError(f"L2Pool2d: expected eps to be at least 0, got {eps!r}")
        self.eps = float(eps)
        settings = zip(self.kernel, self.stride, self.padding, strict=True)
        self.windows = [Window(extent, step, (pad, pad)) for extent, step, pad in settings]

    def forward(self, x: Tensor) -> Tensor:
        """Returns (batch, maps, out_height, out_width) from x: (batch, maps, height, width)."""
        if not isinstance(x, ShardedTensor):
            return super().forward(x)
        with DisableTorchFunction():
            return super().forward(x)

    def local(self, x: Tensor) -> Tensor:
        """Returns (batch, maps, out_height, out_width) from images with their padding or halo."""
        return pooled(x, Windows((x.shape[-2], x.shape[-1]), self.kernel, self.stride), self.eps)

    def extra_repr(self) -> str:
        text = f"kernel={self.kernel}, stride={self.stride}"
        text += f", eps={self.eps:g}" if self.eps else ""
        return text + (f", padding={self.padding}" if self.padding != (0, 0) else "")


def pooled(x: Tensor, windows: Windows, eps: float = 0.0) -> Tensor:
    """Returns the pooled images, (batch, map, out_height, out_width), from x: (batch, map, height, width)."""
    return _Pool.apply(x, windows, eps)


def norms_of(image: Tensor, windows: Windows, eps: float) -> Tensor:
    """Returns the pooled values of an image, both (height, width, map, batch). Not differentiable."""
    squares = sums_of_squares(image, windows)
    return (squares.add_(eps) if eps else squares).sqrt_()


def gradient_of_norms(g: Tensor, image: Tensor, norms: Tensor, windows: Windows) -> Tensor:
    """Returns the gradient of the image from `g`, the gradient of its `norms`. Not differentiable."""
    field, slopes = room_for_spreading(g, windows)
    # Division by infinity: the gradient is 0 where the sum of squares is 0.
    torch.div(g, torch.threshold(norms, 0.0, torch.inf), out=slopes)
    return spread_of(field, windows).mul_(image)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: Windows, eps: float) -> Tensor:
        ctx.windows = windows
        y = from_pixels(norms_of(pixels(x), windows, eps))
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, y = ctx.saved_tensors
        g, image, norms = pixels_as(gradients[0], x), pixels(x), pixels(y)
        if torch.is_grad_enabled():  # create_graph=True
            slopes = g / norms.masked_fill(norms == 0, torch.inf)
            return from_pixels(image * spread_over_windows(slopes, ctx.windows)), None, None
        return from_pixels(gradient_of_norms(g, image, norms, ctx.windows)), None, None
