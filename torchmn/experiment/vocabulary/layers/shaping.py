"""Layers that only rearrange."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from torchmn.experiment.file.fields import Extent, ShapeField
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape, image_dims, text


@register_layer("flatten")
class FlattenLayer(Layer):
    """Each sample as a vector."""

    def build(self, shape: Shape) -> nn.Module:
        return nn.Flatten()


@register_layer("reshape")
class ReshapeLayer(Layer):
    """Each sample in another shape, with as many values."""

    shorthand: ClassVar[str | None] = "shape"

    shape: ShapeField = Field(description="the shape of a sample afterwards, as [28, 28]")

    def build(self, shape: Shape) -> nn.Module:
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(
                f"a sample of {text(shape)} has {math.prod(shape)} values, and one of {text(self.shape)} has "
                f"{math.prod(self.shape)}"
            )
        return (
            nn.Unflatten(1, self.shape) if len(shape) == 1 else nn.Sequential(nn.Flatten(), nn.Unflatten(1, self.shape))
        )


class Slice(nn.Module):
    """The maps, or units, from `first` to `last`."""

    def __init__(self, first: int, last: int):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.first : self.last]


@register_layer("slice")
class SliceLayer(Layer):
    """Some of the maps, or units."""

    first: int = Field(0, ge=0)
    last: int = Field(ge=1, description="the one after the last that stays")

    def build(self, shape: Shape) -> nn.Module:
        if not self.first < self.last <= shape[0]:
            raise ValueError(f"there is no {self.first}..{self.last} among {shape[0]} maps or units")
        return Slice(self.first, self.last)


@register_layer("upsample")
class UpsampleLayer(Layer):
    """Larger images."""

    shorthand: ClassVar[str | None] = "factor"

    factor: Extent = Field(description="how many times as large")
    mode: Literal["nearest", "bilinear"] = "nearest"

    def build(self, shape: Shape) -> nn.Module:
        image_dims(self.kind, shape)
        return nn.Upsample(scale_factor=self.factor, mode=self.mode)
