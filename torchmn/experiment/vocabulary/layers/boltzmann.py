"""Layers that are pretrained as restricted Boltzmann machines; several of them form a deep belief network."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.data.batches import rank_slice
from torchmn.experiment.file.fields import Count, Positive
from torchmn.experiment.file.registry import Layer, Section, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape


class Boltzmann(nn.Module):
    """A restricted Boltzmann machine; its forward is a logistic layer, the probabilities of the hidden units.

    `visible_bias` is used by pretraining only, and is therefore a buffer.

    Args:
        visible: number of visible units.
        hidden: number of hidden units.
        epochs: number of epochs of pretraining.
        lr: learning rate of pretraining.
    """

    def __init__(self, visible: int, hidden: int, epochs: int, lr: float):
        super().__init__()
        self.hidden = nn.Linear(visible, hidden)
        nn.init.normal_(self.hidden.weight, 0.0, 0.01)
        nn.init.zeros_(self.hidden.bias)
        self.register_buffer("visible_bias", torch.zeros(visible))
        self.epochs, self.lr = epochs, lr

    def forward(self, visible: Tensor) -> Tensor:
        """Returns the probabilities of the hidden units, (batch, hidden), given those of the visible ones."""
        return torch.sigmoid(self.hidden(visible))

    def reconstruct(self, hidden: Tensor) -> Tensor:
        """Returns the probabilities of the visible units, (batch, visible), given the hidden ones."""
        assert isinstance(self.visible_bias, Tensor)
        return torch.sigmoid(hidden @ self.hidden.weight + self.visible_bias)


def boltzmann_layers(model: nn.Module) -> list[Boltzmann]:
    """Returns the machines among the direct children of a model, from the lowest to the highest."""
    return [module for module in model.children() if isinstance(module, Boltzmann)]


@torch.no_grad()
def layer_input(model: nn.Module, machine: Boltzmann, x: Tensor) -> Tensor:
    """Returns the input of `machine` for a batch `x` of model inputs, computed in eval mode."""
    training = model.training
    model.eval()
    try:
        for module in model.children():
            if module is machine:
                return x
            x = module(x)
    finally:
        model.train(training)
    raise ValueError("the machine is not a direct child of the model")


@torch.no_grad()
def contrastive_divergence(
    machine: Boltzmann, visible: Tensor, seed: int, samples: int, replicas: Communicator
) -> float:
    """Updates a machine by one step of contrastive divergence, and returns ½‖v - v̂‖² per sample of the global batch.

    Every rank draws the random numbers of the global batch and uses its rows, so that results equal those of one rank.

    Args:
        machine: the same on all ranks.
        visible: (batch, units), this rank's samples.
        seed: seed of the random numbers of this step, the same on all ranks.
        samples: the global batch size.
        replicas: the ranks that share the batch; all of them must call.
    """
    hidden = machine(visible)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(samples, hidden.shape[1], generator=generator)[rank_slice(samples, replicas.size, replicas.rank)]
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


class DivergenceOptions(Section):
    """Options of the pretraining of a machine."""

    epochs: int = Field(1, ge=0, description="number of passes over the data")
    lr: Positive = 0.1


@register_layer("rbm", "boltzmann")
class BoltzmannLayer(Layer):
    """A logistic layer on the flattened input, pretrained by contrastive divergence to model that input."""

    shorthand: ClassVar[str | None] = "units"

    units: Count = Field(description="number of hidden units")
    pretraining: DivergenceOptions = Field(default_factory=lambda: DivergenceOptions(epochs=1))

    def build(self, shape: Shape) -> nn.Module:
        return Boltzmann(math.prod(shape), self.units, self.pretraining.epochs, self.pretraining.lr)
