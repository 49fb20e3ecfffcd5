"""Layers of layers: one after the other, or side by side."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from torchmn.experiment.file.fields import LayersField
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.build import chain, output_shape
from torchmn.experiment.vocabulary.layers.options import Shape, text


@register_layer("list", "sequence")
class ListLayer(Layer):
    """Layers one after the other, where one is expected (in a branch)."""

    shorthand: ClassVar[str | None] = "layers"

    layers: LayersField = Field(description="a list of layers")

    def build(self, shape: Shape) -> nn.Module:
        return chain(self.layers, shape)


class Branch(nn.Module):
    """The same input through several modules; their outputs side by side along the maps, or summed."""

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
    """Each of `layers` sees the same input; `join` says what becomes of their outputs."""

    shorthand: ClassVar[str | None] = "layers"

    layers: LayersField = Field(description="a list of layers; `list:` for several one after the other")
    join: Literal["concat", "sum"] = "concat"

    def build(self, shape: Shape) -> nn.Module:
        modules: list[nn.Module] = [chain([layer], shape) for layer in self.layers]
        shapes = [output_shape(module, shape) for module in modules]
        fits = len({s[1:] for s in shapes}) == 1 if self.join == "concat" else len(set(shapes)) == 1
        if not fits:
            raise ValueError(f"outputs of shapes {', '.join(map(text, shapes))} can not be joined by {self.join}")
        return Branch(modules, self.join)
