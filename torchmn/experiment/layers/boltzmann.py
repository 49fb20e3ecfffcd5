"""Layers that are pretrained as restricted Boltzmann machines: several of them make a deep belief net."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from torchmn.experiment.boltzmann import Boltzmann
from torchmn.experiment.fields import Count, Positive
from torchmn.experiment.registry import Layer, register_layer
from torchmn.experiment.weighted import Shape


class Divergence(BaseModel):
    """How a machine learns before there are labels."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    epochs: int = Field(1, ge=0, description="how often it goes over the data")
    lr: Positive = 0.1


@register_layer("rbm", "boltzmann")
class BoltzmannLayer(Layer):
    """A logistic layer, pretrained by contrastive divergence to model its input, which is flattened before."""

    shorthand: ClassVar[str | None] = "units"

    units: Count = Field(description="how many hidden units there are")
    pretraining: Divergence = Field(default_factory=lambda: Divergence(epochs=1))

    def build(self, shape: Shape) -> nn.Module:
        return Boltzmann(math.prod(shape), self.units, self.pretraining.epochs, self.pretraining.lr)
