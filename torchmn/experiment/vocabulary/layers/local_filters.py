"""Layers of the sparse autoencoder: local filters, L2 pooling, contrast normalisation, and layers across maps."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from torchmn.experiment.file.fields import Count, Extent, NotNegative, Padding, Positive
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import (
    Shape,
    WeightedLayer,
    check_window,
    format_shape,
    per_dim,
    set_attributes,
)
from torchmn.experiment.vocabulary.layers.pooling import Pool
from torchmn.nn import CrossMapPool, CrossMapResponseNorm, L2Pool2d, LocalContrastNorm2d, LocalFilter2d


def check_2d(kind: str, shape: Shape) -> None:
    """Raises a ValueError unless samples are images of shape (maps, height, width)."""
    if len(shape) != 3:
        raise ValueError(
            f"{kind} needs images of shape (maps, height, width), got samples of shape {format_shape(shape)}"
        )


def pair(value: int | tuple[int, ...], name: str) -> tuple[int, int]:
    """Returns `value` for height and width."""
    height, width = per_dim(value, 2, name)
    return height, width


@register_layer("local", "local_filter")
class LocalLayer(WeightedLayer):
    """Filters that are not shared between positions: a locally connected layer."""

    maps: Count = Field(description="number of output maps (channels)")
    kernel: Extent = Field(description="size of the window, such as 5 or [5, 3]")
    stride: Extent = 1
    padding: Padding = 0
    bias: bool = False
    unit_norm: bool = Field(False, description="whether filters are scaled to norm 1 after each step")

    def build(self, shape: Shape) -> nn.Module:
        check_2d(self.kind, shape)
        kernel, padding = pair(self.kernel, "kernel"), pair(self.padding, "padding")
        check_window(shape[1:], kernel, padding)
        stride, size = pair(self.stride, "stride"), (shape[1], shape[2])
        module = LocalFilter2d(shape[0], self.maps, kernel, stride, size, self.bias, padding=padding)
        if self.unit_norm:
            set_attributes(module, after_step="unit_norm_")
        return module

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Initialises the filters of each position like those of a convolution.

        Args:
            weight: (out_height, out_width, maps, in_maps, kernel_height, kernel_width)
        """
        for position in (position for row in weight for position in row):
            filters = torch.empty(position.shape, dtype=position.dtype)
            super().fill(filters)
            position.copy_(filters)


@register_layer("l2_pool")
class L2PoolLayer(Pool):
    """The L2 norm of each window."""

    eps: NotNegative = 0.0

    def build(self, shape: Shape) -> nn.Module:
        check_2d(self.kind, shape)
        if self.ceil_mode:
            raise ValueError("l2_pool has no ceil_mode")
        kernel, stride, padding = self.window(shape)
        return L2Pool2d(pair(kernel, "kernel"), pair(stride, "stride"), self.eps, padding=pair(padding, "padding"))


@register_layer("lcn", "local_contrast_norm")
class ContrastNormLayer(Layer):
    """Local contrast normalisation."""

    shorthand: ClassVar[str | None] = "kernel"

    kernel: Extent = Field(description="size of the window, odd")
    method: Literal["subtractive-divisive", "response"] = "subtractive-divisive"
    alpha: Positive | None = None
    beta: Positive | None = None
    threshold: NotNegative | None = None

    def build(self, shape: Shape) -> nn.Module:
        check_2d(self.kind, shape)
        options = {n: getattr(self, n) for n in ("alpha", "beta", "threshold") if getattr(self, n) is not None}
        return LocalContrastNorm2d(pair(self.kernel, "kernel"), shape[0], self.method, **options)


@register_layer("response_norm", "cross_map_response_norm")
class ResponseNormLayer(Layer):
    """Local response normalisation across maps."""

    shorthand: ClassVar[str | None] = "size"

    size: Count = Field(5, description="number of maps in the sum")
    alpha: Positive = 1e-4
    beta: Positive = 0.75

    def build(self, shape: Shape) -> nn.Module:
        check_2d(self.kind, shape)
        return CrossMapResponseNorm(self.size, self.alpha, self.beta)


@register_layer("cross_map_pool")
class CrossMapPoolLayer(Layer):
    """Weighted sums of maps; the weights are kept non-negative."""

    shorthand: ClassVar[str | None] = "maps"

    maps: Count = Field(description="number of output maps (channels)")

    def build(self, shape: Shape) -> nn.Module:
        check_2d(self.kind, shape)
        module = CrossMapPool(shape[0], self.maps)
        set_attributes(module, after_step="nonnegative_")
        return module
