"""Recurrent layers, for samples of shape (time, features)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from torchmn.experiment.file.fields import Count
from torchmn.experiment.file.registry import register_layer
from torchmn.experiment.vocabulary.layers.options import Shape, WeightedLayer, format_shape


class Recurrent(nn.Module):
    """A recurrent module of torch that returns the last state (`output="last"`) or the states of all times ("all")."""

    def __init__(self, cell: nn.RNNBase, output: str):
        super().__init__()
        self.cell, self.output = cell, output

    def forward(self, x: Tensor) -> Tensor:
        """Returns (batch, units) or (batch, time, units), for x of shape (batch, time, features)."""
        states = self.cell(x)[0]
        return states if self.output == "all" else states[:, -1]


class RecurrentLayer(WeightedLayer):
    """Base class of recurrent layers."""

    units: Count = Field(description="size of the state")
    layers: Count = Field(1, description="number of stacked layers")
    output: Literal["last", "all"] = Field("last", description="the last state, or the states of all times")

    def cell(self, features: int) -> nn.RNNBase:
        """Returns the torch module for inputs of so many features."""
        raise NotImplementedError

    def build(self, shape: Shape) -> nn.Module:
        if len(shape) == 3 and shape[0] == 1:
            raise ValueError(
                f"{self.kind} needs sequences of shape (time, features), got images of {format_shape(shape)}: put "
                f"`- reshape: [{shape[1]}, {shape[2]}]` before it to read an image row by row"
            )
        if len(shape) != 2:
            raise ValueError(
                f"{self.kind} needs sequences of shape (time, features), got samples of shape {format_shape(shape)}"
            )
        return Recurrent(self.cell(shape[1]), self.output)


@register_layer("rnn", "recurrent")
class RNNLayer(RecurrentLayer):
    """A plain (Elman) recurrent layer."""

    nonlinearity: Literal["tanh", "relu"] = "tanh"

    def cell(self, features: int) -> nn.RNNBase:
        return nn.RNN(
            features, self.units, self.layers, nonlinearity=self.nonlinearity, bias=self.bias, batch_first=True
        )


@register_layer("lstm")
class LSTMLayer(RecurrentLayer):
    """Long short-term memory."""

    def cell(self, features: int) -> nn.RNNBase:
        return nn.LSTM(features, self.units, self.layers, bias=self.bias, batch_first=True)


@register_layer("gru")
class GRULayer(RecurrentLayer):
    """Gated recurrent units."""

    def cell(self, features: int) -> nn.RNNBase:
        return nn.GRU(features, self.units, self.layers, bias=self.bias, batch_first=True)
