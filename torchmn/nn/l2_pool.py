"""Pooling by the L2 norm of each window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmn.errors import ArgumentError
from torchmn.nn.pair import Size, pair


class L2Pool2d(nn.Module):
    """The square root of `eps` plus the sum of squares of each window, per map.

    stride: as the kernel, if not given; padding: zeros around the image.

    The gradient is exact: x / y inside a window, and zero where the window is all zero, where torch's `LPPool2d`
    gives NaN or an arbitrary choice. Magnitudes whose square is no longer a number of the dtype count as zero.
    """

    def __init__(self, kernel: Size, stride: Size | None = None, eps: float = 0.0, *, padding: Size = 0) -> None:
        super().__init__()
        self.kernel = pair("L2Pool2d", "kernel", kernel)
        self.stride = self.kernel if stride is None else pair("L2Pool2d", "stride", stride)
        self.padding = pair("L2Pool2d", "padding", padding, least=0)
        if any(2 * pad > extent for pad, extent in zip(self.padding, self.kernel, strict=True)):
            raise ArgumentError(
                f"L2Pool2d: expected padding of at most half the kernel {self.kernel}, got {self.padding}: "
                f"more would pool nothing but padding."
            )
        if not eps >= 0:
            raise ArgumentError(f"L2Pool2d: expected eps to be at least 0, got {eps!r}")
        self.eps = float(eps)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, maps, out_height, out_width) from x: (batch, maps, height, width)."""
        squares = F.avg_pool2d(x * x, self.kernel, self.stride, self.padding, divisor_override=1)
        if self.eps:
            return torch.sqrt(squares + self.eps)
        # The root of a 1 in place of a 0 keeps its infinite slope away from the gradient.
        empty = squares == 0
        return torch.where(empty, 0.0, torch.sqrt(torch.where(empty, 1.0, squares)))

    def extra_repr(self) -> str:
        text = f"kernel={self.kernel}, stride={self.stride}"
        text += f", eps={self.eps:g}" if self.eps else ""
        return text + (f", padding={self.padding}" if self.padding != (0, 0) else "")
