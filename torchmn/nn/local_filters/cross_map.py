"""CrossMapResponseNorm and CrossMapPool: layers that combine the maps at each position."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmn.nn.local_filters.image_sizes import count


class CrossMapResponseNorm(nn.Module):
    """x / (1 + alpha / size · Σ x²) ** beta, with the sum over the `size` maps around each map at the same position.

    Maps beyond the first and last count as zeros. An even `size` includes one more map below than above.

    Args:
        size: number of maps in the sum.
        alpha: factor of the sum.
        beta: exponent.

    Raises:
        ArgumentError: if `size` is not an integer of at least 1.
    """

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75) -> None:
        super().__init__()
        self.size = count("CrossMapResponseNorm", "size", size)
        self.alpha = float(alpha)
        self.beta = float(beta)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised images, of the shape of x: (batch, maps, height, width)."""
        return F.local_response_norm(x, self.size, self.alpha, self.beta, k=1.0)

    def extra_repr(self) -> str:
        return f"size={self.size}, alpha={self.alpha:g}, beta={self.beta:g}"


class CrossMapPool(nn.Conv2d):
    """Each output map is a sum of the input maps with non-negative weights: a 1 x 1 convolution without bias.

    Weights are initialised uniformly with a mean of 1 / in_maps. A step of an optimizer can make a weight negative:
    call `nonnegative_()` after it.

    Args:
        in_maps: number of maps of the input.
        out_maps: number of maps of the output.
        device: of the weight.
        dtype: of the weight.

    Attributes:
        weight: (out_maps, in_maps, 1, 1).

    Raises:
        ArgumentError: if a number of maps is not an integer of at least 1.
    """

    def __init__(self, in_maps: int, out_maps: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        count("CrossMapPool", "in_maps", in_maps)
        count("CrossMapPool", "out_maps", out_maps)
        super().__init__(in_maps, out_maps, kernel_size=1, bias=False, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the weights uniformly from 0 to 2 / in_maps."""
        self.weight.uniform_(0, 2 / self.in_channels)

    @torch.no_grad()
    def nonnegative_(self) -> CrossMapPool:
        """Sets every negative weight to 0, and returns the layer."""
        self.weight.clamp_(min=0)
        return self

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"
