"""Initializers of weights: `init: gaussian`, or `init: {name: gaussian, std: 0.01}`.

`build()` returns a function that fills a tensor in place. Random numbers come from torch's global generator, seeded
with the experiment's seed: every rank draws the same global tensors, which are sharded afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchmn.experiment.file.fields import Count, Positive
from torchmn.experiment.file.registry import Options, register_initializer

Fill = Callable[[Tensor], object]


def fans(weight: Tensor) -> tuple[int, int]:
    """Returns fan-in and fan-out: the inputs of each output value, and the outputs of each input value."""
    window = math.prod(weight.shape[2:])
    inputs = weight.shape[1] if weight.dim() > 1 else weight.shape[0]
    return inputs * window, weight.shape[0] * window


@register_initializer("uniform")
class Uniform(Options):
    """Uniform in [low, high)."""

    low: float = -0.1
    high: float = 0.1

    def build(self) -> Fill:
        return lambda weight: nn.init.uniform_(weight, self.low, self.high)


@register_initializer("auto_uniform")
class AutoUniform(Options):
    """Uniform within ±scale / √(fan-in)."""

    scale: Positive = 1.0

    def build(self) -> Fill:
        def fill(weight: Tensor) -> None:
            bound = self.scale / math.sqrt(fans(weight)[0])
            nn.init.uniform_(weight, -bound, bound)

        return fill


@register_initializer("gaussian", "normal")
class Gaussian(Options):
    """Normal distribution with `mean` and `std`."""

    mean: float = 0.0
    std: Positive = 0.01

    def build(self) -> Fill:
        return lambda weight: nn.init.normal_(weight, self.mean, self.std)


@register_initializer("glorot", "node_normalized", "xavier")
class Glorot(Options):
    """Uniform within ±scale √(6 / (fan-in + fan-out))."""

    scale: Positive = 1.0

    def build(self) -> Fill:
        def fill(weight: Tensor) -> None:
            bound = self.scale * math.sqrt(6 / sum(fans(weight)))
            nn.init.uniform_(weight, -bound, bound)

        return fill


@register_initializer("kaiming", "he")
class Kaiming(Options):
    """Normal distribution with std √(2 / fan-in)."""

    def build(self) -> Fill:
        return lambda weight: nn.init.normal_(weight, 0.0, math.sqrt(2 / fans(weight)[0]))


@register_initializer("orthonormal", "ortho_normalized")
class Orthonormal(Options):
    """Orthonormal rows (or columns, if these are fewer), times `scale`."""

    scale: Positive = 1.0

    def build(self) -> Fill:
        return lambda weight: nn.init.orthogonal_(weight, self.scale) if weight.dim() > 1 else nn.init.zeros_(weight)


@register_initializer("sparse_eigen")
class SparseEigen(Options):
    """`sparseness` normal values per row, zeros elsewhere, scaled to a largest singular value of `eigenvalue`."""

    sparseness: Count = 15
    eigenvalue: Positive = 1.2

    def build(self) -> Fill:
        def fill(weight: Tensor) -> None:
            with torch.no_grad():
                rows = torch.zeros(weight.shape[0], weight[0].numel(), dtype=weight.dtype)
                for row in rows:
                    chosen = torch.randperm(len(row))[: self.sparseness]
                    row[chosen] = torch.randn(len(chosen), dtype=weight.dtype)
                largest = torch.linalg.matrix_norm(rows, 2)
                weight.copy_((rows * (self.eigenvalue / largest.clamp(min=1e-12))).view_as(weight))

        return fill


@register_initializer("constant")
class ConstantValue(Options):
    """All elements equal to `value`."""

    value: float = 0.0

    def build(self) -> Fill:
        return lambda weight: nn.init.constant_(weight, self.value)
