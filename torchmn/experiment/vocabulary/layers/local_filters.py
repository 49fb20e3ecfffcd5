"""The layers of the sparse autoencoder, and their relatives across maps."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from torchmn.experiment.file.fields import Count, Extent, NotNegative, Padding, Positive
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape, Weighted, check_window, per_dim, text
from torchmn.experiment.vocabulary.layers.pooling import Pool
from torchmn.nn import CrossMapPool, CrossMapResponseNorm, L2Pool2d, LocalContrastNorm2d, LocalFilter2d


def two_dims(kind: str, shape: Shape) -> None:
    if len(shape) != 3:
        raise ValueError(f"{kind} needs images of shape (maps, height, width), got samples of shape {text(shape)}")


@register_layer("local", "local_filter")
class LocalLayer(Weighted):
    """Filters that are not shared: each output has one of its own."""

    maps: Count = Field(description="how many feature maps come out")
    kernel: Extent = Field(description="the side of the window, as 5 or [5, 3]")
    stride: Extent = 1
    padding: Padding = 0
    bias: bool = False
    unit_norm: bool = Field(False, description="bring every filter back to length 1 after each step")

    def build(self, shape: Shape) -> nn.Module:
        two_dims(self.kind, shape)
        kernel, padding = per_dim(self.kernel, 2, "kernel"), per_dim(self.padding, 2, "padding")
        check_window(shape[1:], kernel, padding)
        stride = per_dim(self.stride, 2, "stride")
        module = LocalFilter2d(shape[0], self.maps, kernel, stride, shape[1:], self.bias, padding=padding)  # type: ignore[arg-type]
        if self.unit_norm:
            module.after_step = "unit_norm_"  # type: ignore[assignment]
        return module

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Each place begins as a conv does. weight: (out_height, out_width, maps, in_maps, kernel height, width)"""
        for place in (place for row in weight for place in row):
            filters = torch.empty(place.shape, dtype=place.dtype)
            super().fill(filters)
            place.copy_(filters)


@register_layer("l2_pool")
class L2PoolLayer(Pool):
    """The square root of the sum of squares of each window."""

    eps: NotNegative = 0.0

    def build(self, shape: Shape) -> nn.Module:
        two_dims(self.kind, shape)
        if self.ceil_mode:
            raise ValueError("l2_pool has no ceil_mode")
        kernel, stride, padding = self.window(shape)
        return L2Pool2d(kernel, stride, self.eps, padding=padding)  # type: ignore[arg-type]


@register_layer("lcn", "local_contrast_norm")
class ContrastNormLayer(Layer):
    """Evens out the local mean and contrast."""

    shorthand: ClassVar[str | None] = "kernel"

    kernel: Extent = Field(description="the side of the window, odd")
    method: Literal["subtractive-divisive", "response"] = "subtractive-divisive"
    alpha: Positive | None = None
    beta: Positive | None = None
    threshold: NotNegative | None = None

    def build(self, shape: Shape) -> nn.Module:
        two_dims(self.kind, shape)
        options = {n: getattr(self, n) for n in ("alpha", "beta", "threshold") if getattr(self, n) is not None}
        return LocalContrastNorm2d(per_dim(self.kernel, 2, "kernel"), shape[0], self.method, **options)  # type: ignore[arg-type]


@register_layer("response_norm", "cross_map_response_norm")
class ResponseNormLayer(Layer):
    """Divides each value by the strength of its neighbours in other maps."""

    shorthand: ClassVar[str | None] = "size"

    size: Count = Field(5, description="over how many maps")
    alpha: Positive = 1e-4
    beta: Positive = 0.75

    def build(self, shape: Shape) -> nn.Module:
        two_dims(self.kind, shape)
        return CrossMapResponseNorm(self.size, self.alpha, self.beta)


@register_layer("cross_map_pool")
class CrossMapPoolLayer(Layer):
    """Sums of maps with weights that stay non-negative."""

    shorthand: ClassVar[str | None] = "maps"

    maps: Count = Field(description="how many feature maps come out")

    def build(self, shape: Shape) -> nn.Module:
        two_dims(self.kind, shape)
        module = CrossMapPool(shape[0], self.maps)
        module.after_step = "nonnegative_"  # type: ignore[assignment]
        return module
