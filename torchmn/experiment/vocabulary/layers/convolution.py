"""Convolutions and transposed convolutions in 1 to 3 dims."""

from __future__ import annotations

from typing import Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from torch import nn

from torchmn.experiment.file.fields import Count, Extent, Padding, Resolved, extent_validator
from torchmn.experiment.file.registry import register_layer
from torchmn.experiment.vocabulary.layers.options import Shape, WeightedLayer, check_window, image_dims, per_dim

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def _padding(value: object) -> int | tuple[int, ...] | str:
    return "same" if value == "same" else extent_validator(0, ", or 'same'")(value)


PaddingOrSame = Resolved[
    int | tuple[int, ...] | Literal["same"],
    BeforeValidator(_padding),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "array"}, {"const": "same"}]}),
]


@register_layer("conv", "convolution")
class Convolution(WeightedLayer):
    """A convolution of as many dims as the input has: 1, 2 or 3."""

    maps: Count = Field(description="number of output maps (channels)")
    kernel: Extent = Field(description="size of the window, such as 5 or [5, 3]")
    stride: Extent = 1
    padding: PaddingOrSame = Field(0, description="a number, one per dim, or `same`")
    dilation: Extent = 1
    groups: Count = 1
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros"

    def build(self, shape: Shape) -> nn.Module:
        dims = image_dims(self.kind, shape)
        kernel, stride = per_dim(self.kernel, dims, "kernel"), per_dim(self.stride, dims, "stride")
        dilation = per_dim(self.dilation, dims, "dilation")
        padding = self._padding(kernel, stride, dilation)
        check_window(shape[1:], kernel, padding, dilation)
        for whose, maps in (("input's", shape[0]), ("layer's", self.maps)):
            if maps % self.groups:
                raise ValueError(f"groups: {self.groups} does not divide the {whose} number of maps, {maps}")
        return CONVOLUTIONS[dims](
            shape[0], self.maps, kernel, stride, padding, dilation, self.groups, self.bias, self.padding_mode
        )

    def _padding(self, kernel: Shape, stride: Shape, dilation: Shape) -> Shape:
        if self.padding != "same":
            return per_dim(self.padding, len(kernel), "padding")
        spans = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        if any(span % 2 for span in spans) or any(s > 1 for s in stride):
            raise ValueError("padding: same needs an odd kernel and stride 1")
        return tuple(span // 2 for span in spans)


@register_layer("deconv", "conv_transpose")
class Deconvolution(WeightedLayer):
    """A transposed convolution, which enlarges images."""

    maps: Count = Field(description="number of output maps (channels)")
    kernel: Extent = Field(description="size of the window, such as 5 or [5, 3]")
    stride: Extent = 1
    padding: Padding = 0
    output_padding: Padding = 0

    def build(self, shape: Shape) -> nn.Module:
        dims = image_dims(self.kind, shape)
        return TRANSPOSED[dims](
            shape[0],
            self.maps,
            per_dim(self.kernel, dims, "kernel"),
            per_dim(self.stride, dims, "stride"),
            per_dim(self.padding, dims, "padding"),
            per_dim(self.output_padding, dims, "output_padding"),
            bias=self.bias,
        )
