"""Layers that reshape, slice or resize samples."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from torchmn.experiment.file.fields import Extent, ShapeField
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape, format_shape, image_dims


@register_layer("flatten")
class FlattenLayer(Layer):
    """Flattens each sample to a vector."""

    def build(self, shape: Shape) -> nn.Module:
        return nn.Flatten()


@register_layer("reshape")
class ReshapeLayer(Layer):
    """Reshapes each sample."""

    shorthand: ClassVar[str | None] = "shape"

    shape: ShapeField = Field(description="the new shape of a sample, such as [28, 28]")

    def build(self, shape: Shape) -> nn.Module:
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(
                f"cannot reshape a sample of {format_shape(shape)}, {math.prod(shape)} values, to "
                f"{format_shape(self.shape)}, {math.prod(self.shape)} values"
            )
        return (
            nn.Unflatten(1, self.shape) if len(shape) == 1 else nn.Sequential(nn.Flatten(), nn.Unflatten(1, self.shape))
        )


class Slice(nn.Module):
    """Returns the maps, or units, from `first` to `last` (exclusive)."""

    def __init__(self, first: int, last: int):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.first : self.last]


@register_layer("slice")
class SliceLayer(Layer):
    """Selects a range of maps or units."""

    first: int = Field(0, ge=0)
    last: int = Field(ge=1, description="the index after the last map or unit")

    def build(self, shape: Shape) -> nn.Module:
        if not self.first < self.last <= shape[0]:
            raise ValueError(
                f"expected 0 <= first < last <= {shape[0]} maps or units, got {self.first} and {self.last}"
            )
        return Slice(self.first, self.last)


@register_layer("upsample")
class UpsampleLayer(Layer):
    """Enlarges images."""

    shorthand: ClassVar[str | None] = "factor"

    factor: Extent = Field(description="scale factor, such as 2 or [2, 3]")
    mode: Literal["nearest", "bilinear"] = "nearest"

    def build(self, shape: Shape) -> nn.Module:
        image_dims(self.kind, shape)
        return nn.Upsample(scale_factor=self.factor, mode=self.mode)
