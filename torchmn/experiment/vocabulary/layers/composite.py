"""Layers that contain layers, in sequence or in parallel branches."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from torchmn.experiment.file.fields import LayersField
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.build import build_layers, output_shape
from torchmn.experiment.vocabulary.layers.options import Shape, format_shape


@register_layer("list", "sequence")
class ListLayer(Layer):
    """Layers in sequence, used as one layer (of a branch)."""

    shorthand: ClassVar[str | None] = "layers"

    layers: LayersField = Field(description="a list of layers")

    def build(self, shape: Shape) -> nn.Module:
        return build_layers(self.layers, shape)


class Branch(nn.Module):
    """Applies several modules to the same input, and concatenates their outputs along dim 1 or sums them."""

    def __init__(self, modules: list[nn.Module], join: str):
        super().__init__()
        self.branches = nn.ModuleList(modules)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        outputs = [branch(x) for branch in self.branches]
        if self.join == "concat":
            return torch.cat(outputs, dim=1)
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total


@register_layer("branch")
class BranchLayer(Layer):
    """Applies each of `layers` to the same input; `join` concatenates or sums their outputs."""

    shorthand: ClassVar[str | None] = "layers"

    layers: LayersField = Field(description="a list of layers; use `list:` for several in sequence")
    join: Literal["concat", "sum"] = "concat"

    def build(self, shape: Shape) -> nn.Module:
        modules: list[nn.Module] = [build_layers([layer], shape) for layer in self.layers]
        shapes = [output_shape(module, shape) for module in modules]
        fits = len({s[1:] for s in shapes}) == 1 if self.join == "concat" else len(set(shapes)) == 1
        if not fits:
            raise ValueError(
                f"outputs of shapes {', '.join(map(format_shape, shapes))} cannot be joined by {self.join}"
            )
        return Branch(modules, self.join)
