"""Dropout. Its masks are those of one rank at any number of ranks: `experiment.randomness` sees to that."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import Tensor, nn

from torchmn.experiment.file.fields import Share, problem
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape


class Dropout(nn.Dropout):
    """nn.Dropout that draws its mask in the order of indices.

    torch draws it in the order in which values lie in memory, which depends on the convolution before.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        return super().forward(input.contiguous())


@register_layer("dropout")
class DropoutLayer(Layer):
    """Sets a share `rate` of the values to zero in training; the others grow so that the mean stays."""

    shorthand: ClassVar[str | None] = "rate"

    rate: Share = Field(0.5, description="which share of the values becomes zero")
    keep: float | None = Field(None, gt=0, le=1, description="the other way round: which share stays")

    @model_validator(mode="before")
    @classmethod
    def _one_of_both(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("keep") is None:
            return given
        if "rate" in given:
            raise problem("has both a rate and a keep: expected one of them")
        keep = given["keep"]
        if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
            return given  # the field itself says what is wrong
        return {**{key: value for key, value in given.items() if key != "keep"}, "rate": 1.0 - keep}

    def build(self, shape: Shape) -> nn.Module:
        return Dropout(self.rate)
