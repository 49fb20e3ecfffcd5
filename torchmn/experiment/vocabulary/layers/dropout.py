"""Dropout, with masks that do not depend on the number of ranks."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator
from torch import Tensor, nn

from torchmn.experiment.file.fields import Fraction, invalid
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape


class Dropout(nn.Dropout):
    """nn.Dropout that draws its mask in the order of indices.

    nn.Dropout draws it in memory order, which depends on the memory format that the layer before returns.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        return super().forward(input.contiguous())


@register_layer("dropout")
class DropoutLayer(Layer):
    """Sets a fraction `rate` of the values to zero in training, and scales the others to keep the mean."""

    shorthand: ClassVar[str | None] = "rate"

    rate: Fraction = Field(0.5, description="the fraction of values to drop")
    keep: float | None = Field(None, gt=0, le=1, description="instead of rate: the fraction of values to keep")

    @model_validator(mode="before")
    @classmethod
    def _keep_to_rate(cls, values: object) -> object:
        if not isinstance(values, dict) or values.get("keep") is None:
            return values
        if "rate" in values:
            raise invalid("has both rate and keep: expected one of them")
        keep = values["keep"]
        if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
            return values  # the validation of the field reports it
        return {**{key: value for key, value in values.items() if key != "keep"}, "rate": 1.0 - keep}

    def build(self, shape: Shape) -> nn.Module:
        return Dropout(self.rate)
