"""Layers that are pretrained as restricted Boltzmann machines: several of them make a deep belief net."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.data.batches import share
from torchmn.experiment.file.fields import Count, Positive
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape


class Boltzmann(nn.Module):
    """The hidden units' probabilities, given the visible ones: a logistic layer that can be pretrained.

    visible_bias is used in the pretraining alone, and so no parameter of the training.
    """

    def __init__(self, visible: int, hidden: int, epochs: int, lr: float):
        super().__init__()
        self.hidden = nn.Linear(visible, hidden)
        nn.init.normal_(self.hidden.weight, 0.0, 0.01)
        nn.init.zeros_(self.hidden.bias)
        self.register_buffer("visible_bias", torch.zeros(visible))
        self.epochs, self.lr = epochs, lr

    def forward(self, visible: Tensor) -> Tensor:
        """visible: (batch, units), as probabilities"""
        return torch.sigmoid(self.hidden(visible))

    def reconstruct(self, hidden: Tensor) -> Tensor:
        """The visible units' probabilities, given the hidden ones."""
        assert isinstance(self.visible_bias, Tensor)
        return torch.sigmoid(hidden @ self.hidden.weight + self.visible_bias)


def machines(model: nn.Module) -> list[Boltzmann]:
    """The machines that stand in the chain of a model, from the lowest to the highest."""
    return [module for module in model.children() if isinstance(module, Boltzmann)]


@torch.no_grad()
def input_of(model: nn.Module, machine: Boltzmann, x: Tensor) -> Tensor:
    """What the modules before `machine` make of inputs."""
    training = model.training
    model.eval()
    try:
        for module in model.children():
            if module is machine:
                return x
            x = module(x)
    finally:
        model.train(training)
    raise ValueError("the machine does not stand in the chain of the model")


@torch.no_grad()
def contrastive_divergence(
    machine: Boltzmann, visible: Tensor, seed: int, samples: int, replicas: Communicator
) -> float:
    """One update; gives ½‖v - v̂‖² per sample, of all ranks.

    visible: (batch, units), this rank's share of `samples`. Every rank draws the numbers of the whole batch and takes
    its rows, so that hidden units are sampled as on one rank.
    """
    hidden = machine(visible)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(samples, hidden.shape[1], generator=generator)[share(samples, replicas.size, replicas.rank)]
    sampled = (hidden > drawn.to(hidden.device)).to(hidden.dtype)
    visible_again = machine.reconstruct(sampled)
    hidden_again = machine(visible_again)
    error = visible - visible_again
    changes = [
        hidden.T @ visible - hidden_again.T @ visible_again,
        (hidden - hidden_again).sum(dim=0),
        error.sum(dim=0),
        0.5 * (error * error).sum().reshape(1),
    ]
    if replicas.size > 1:
        total = replicas.allreduce(torch.cat([change.flatten() for change in changes]))
        changes = [
            part.view_as(old) for part, old in zip(total.split([c.numel() for c in changes]), changes, strict=True)
        ]
    for value, change in zip((machine.hidden.weight, machine.hidden.bias, machine.visible_bias), changes, strict=False):
        assert isinstance(value, Tensor)
        value.add_(change, alpha=machine.lr / samples)
    return float(changes[3]) / samples


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
