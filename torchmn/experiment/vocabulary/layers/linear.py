"""Fully connected layers."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field
from torch import nn

from torchmn.experiment.file.fields import Count
from torchmn.experiment.file.registry import register_layer
from torchmn.experiment.vocabulary.layers.options import Shape, Weighted


@register_layer("linear", "fully_connected")
class Linear(Weighted):
    """Every unit sees all of the input, which is flattened before."""

    shorthand: ClassVar[str | None] = "units"

    units: Count = Field(description="how many numbers come out")

    def build(self, shape: Shape) -> nn.Module:
        return nn.Linear(math.prod(shape), self.units, self.bias)
