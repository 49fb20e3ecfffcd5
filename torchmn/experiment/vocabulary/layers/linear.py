"""Fully connected layers."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field
from torch import nn

from torchmn.experiment.file.fields import Count
from torchmn.experiment.file.registry import register_layer
from torchmn.experiment.vocabulary.layers.options import Shape, WeightedLayer


@register_layer("linear", "fully_connected")
class Linear(WeightedLayer):
    """A fully connected layer on the flattened input."""

    shorthand: ClassVar[str | None] = "units"

    units: Count = Field(description="number of outputs")

    def build(self, shape: Shape) -> nn.Module:
        return nn.Linear(math.prod(shape), self.units, self.bias)
