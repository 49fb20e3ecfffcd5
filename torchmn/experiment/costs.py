"""Costs: what a training makes smaller. `build(activation)` gives a function of outputs and targets.

The function gives one loss per sample, so that every rank can sum its own and all together divide by the batch.
outputs: (batch, units), targets: labels (batch,) or values of the outputs' shape
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from torchmn.experiment.registry import Options, register_cost

Losses = Callable[[Tensor, Tensor], Tensor]
SMALLEST = 1e-7
"""Where a probability is clipped, before its logarithm is taken."""


def one_hot(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets as values of the outputs' shape: labels become rows with a single one."""
    if targets.is_floating_point():
        return targets.to(outputs.dtype).reshape(outputs.shape)
    return functional.one_hot(targets, outputs.shape[1]).to(outputs.dtype)


def per_sample(values: Tensor) -> Tensor:
    return values.flatten(1).sum(dim=1)


def binary(outputs: Tensor, targets: Tensor, are_probabilities: bool) -> Tensor:
    """-Σ t log p + (1-t) log(1-p) of each sample."""
    wanted = one_hot(targets, outputs)
    if not are_probabilities:
        return per_sample(functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="none"))
    p = outputs.clamp(SMALLEST, 1 - SMALLEST)
    return -per_sample(wanted * torch.log(p) + (1 - wanted) * torch.log(1 - p))


@register_cost("cross_entropy")
class CrossEntropy(Options):
    """-log of the probability of the right class. Outputs are scores; after `softmax` they are taken as
    probabilities, and after `logistic` each unit as a probability of its own (binary cross-entropy)."""

    def build(self, activation: str) -> Losses:
        if activation == "logistic":
            return lambda outputs, targets: binary(outputs, targets, are_probabilities=True)
        if activation == "softmax":
            return self._of_probabilities
        return self._of_scores

    @staticmethod
    def _of_scores(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return -per_sample(targets * functional.log_softmax(outputs, dim=1))
        return functional.cross_entropy(outputs, targets, reduction="none")

    @staticmethod
    def _of_probabilities(outputs: Tensor, targets: Tensor) -> Tensor:
        logs = torch.log(outputs.clamp(min=SMALLEST))
        return -per_sample(one_hot(targets, outputs) * logs)


@register_cost("binary_cross_entropy")
class BinaryCrossEntropy(Options):
    """-Σ t log p + (1-t) log(1-p) over the units. Outputs are scores, or probabilities after `logistic`."""

    def build(self, activation: str) -> Losses:
        return lambda outputs, targets: binary(outputs, targets, activation in ("logistic", "softmax"))


@register_cost("sum_squared")
class SumSquared(Options):
    """½ Σ (output - target)² over the units."""

    def build(self, activation: str) -> Losses:
        return lambda outputs, targets: per_sample((outputs - one_hot(targets, outputs)) ** 2) / 2


@register_cost("mean_squared")
class MeanSquared(Options):
    """The mean of (output - target)² over the units."""

    def build(self, activation: str) -> Losses:
        return lambda outputs, targets: ((outputs - one_hot(targets, outputs)) ** 2).flatten(1).mean(dim=1)


@register_cost("absolute")
class Absolute(Options):
    """Σ |output - target| over the units."""

    def build(self, activation: str) -> Losses:
        return lambda outputs, targets: per_sample((outputs - one_hot(targets, outputs)).abs())
