"""Layers that combine the maps at each position, and never look at a neighbouring one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmn.nn.local_filters.pair import count


class CrossMapResponseNorm(nn.Module):
    """x / (1 + alpha / size · Σ x²) ** beta, the sum over the `size` maps around each map at the same position.

    Beside the first and the last map lies nothing. An even `size` reaches one map further down than up.
    """

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75) -> None:
        super().__init__()
        self.size = count("CrossMapResponseNorm", "size", size)
        self.alpha = float(alpha)
        self.beta = float(beta)

    def forward(self, x: Tensor) -> Tensor:
        """The normalised images, from x: (batch, maps, height, width)."""
        return F.local_response_norm(x, self.size, self.alpha, self.beta, k=1.0)

    def extra_repr(self) -> str:
        return f"size={self.size}, alpha={self.alpha:g}, beta={self.beta:g}"


class CrossMapPool(nn.Conv2d):
    """Each output map is a sum of the input maps with non-negative weights: a 1 x 1 convolution without bias.

    weight: (out_maps, in_maps, 1, 1), which starts uniformly random with a mean of 1 / in_maps. An optimizer can
    make a weight negative: call `nonnegative_()` after its step to keep the promise.
    """

    def __init__(self, in_maps: int, out_maps: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        count("CrossMapPool", "in_maps", in_maps)
        count("CrossMapPool", "out_maps", out_maps)
        super().__init__(in_maps, out_maps, kernel_size=1, bias=False, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random weights from 0 to 2 / in_maps."""
        self.weight.uniform_(0, 2 / self.in_channels)

    @torch.no_grad()
    def nonnegative_(self) -> CrossMapPool:
        """Set every negative weight to 0."""
        self.weight.clamp_(min=0)
        return self

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"
