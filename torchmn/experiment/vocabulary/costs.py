"""Costs: what a training makes smaller. `build(activation)` gives a function of outputs and targets.

The function gives one loss per sample, so that every rank can sum its own and all together divide by the batch.
outputs: (batch, units), targets: labels (batch,) or values of the outputs' shape
A cost `of_probabilities` gets, after softmax or logistic, their logarithms: Probabilities, computed from the scores.
A cost of the batch as a whole (`of_batch`) gets a third argument, which sums a tensor over the ranks of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from torchmn.errors import ExperimentError
from torchmn.experiment.file.fields import Positive, UnitsField
from torchmn.experiment.file.registry import Options, register_cost
from torchmn.experiment.file.registry import costs as registered
from torchmn.experiment.vocabulary.scores import Probabilities, logarithms

Losses = Callable[[Any, Tensor], Tensor]
SumOverRanks = Callable[[Tensor], Tensor]


class Cost(Options):
    """What every cost has, so that a model can have several: on which units, against what, and how much it counts."""

    of_batch: ClassVar[bool] = False
    of_probabilities: ClassVar[bool] = False

    scale: Positive = Field(1.0, description="by what it is multiplied")
    units: UnitsField = Field(None, description="of which outputs it is, as [0, 10]; of all, if it is not said")
    target: Literal["labels", "inputs"] | None = Field(None, description="the model's target, if it is not said")
    outputs: Literal["scores", "probabilities"] | None = Field(
        None, description="what the units are; if it is not said, that follows from the last activation"
    )


registered.base_of_functions = Cost


def one_hot(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets as values of the outputs' shape: labels become rows with a single one."""
    if targets.is_floating_point():
        return targets.to(outputs.dtype).reshape(outputs.shape)
    return functional.one_hot(targets, outputs.shape[1]).to(outputs.dtype)


def per_sample(values: Tensor) -> Tensor:
    return values.flatten(1).sum(dim=1)


def check_per_sample(values: Tensor, outputs: Tensor, name: str) -> None:
    """Raise where a user's cost or metric gives a mean: the mean of ranks' means is not that of the batch."""
    if values.shape != outputs.shape[:1]:
        raise ExperimentError(
            f"{name}: expected one number per sample, of shape ({len(outputs)},), got {tuple(values.shape)}: use "
            "reduction='none', and sum over all dims but the first"
        )


def binary_of_scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """-Σ t log p + (1-t) log(1-p) of each sample, where p is the logistic function of an output."""
    wanted = one_hot(targets, outputs)
    return per_sample(functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="none"))


def binary_of_probabilities(outputs: Tensor | Probabilities, targets: Tensor) -> Tensor:
    """-Σ t log p + (1-t) log(1-p) of each sample."""
    given = logarithms(outputs)
    log, log_not = given.log, given.log_not
    wanted = one_hot(targets, log)
    return -per_sample(wanted * log + (1 - wanted) * log_not)


@register_cost("cross_entropy")
class CrossEntropy(Cost):
    """-log of the probability of the right class. Outputs are scores; after `softmax` they are taken as
    probabilities, and after `logistic` each unit as a probability of its own (binary cross-entropy)."""

    of_probabilities: ClassVar[bool] = True

    def build(self, activation: str) -> Losses:
        if activation == "logistic":
            return binary_of_probabilities
        if activation == "softmax":
            return self._of_probabilities
        return self._of_scores

    @staticmethod
    def _of_scores(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return -per_sample(one_hot(targets, outputs) * functional.log_softmax(outputs, dim=1))
        return functional.cross_entropy(outputs, targets, reduction="none")

    @staticmethod
    def _of_probabilities(outputs: Tensor | Probabilities, targets: Tensor) -> Tensor:
        log = logarithms(outputs).log
        return -per_sample(one_hot(targets, log) * log)


@register_cost("binary_cross_entropy")
class BinaryCrossEntropy(Cost):
    """-Σ t log p + (1-t) log(1-p) over the units. Outputs are scores, or probabilities after `logistic`."""

    of_probabilities: ClassVar[bool] = True

    def build(self, activation: str) -> Losses:
        return binary_of_probabilities if activation in ("logistic", "softmax") else binary_of_scores


@register_cost("sum_squared")
class SumSquared(Cost):
    """½ Σ (output - target)² over the units."""

    def build(self, activation: str) -> Losses:
        return lambda outputs, targets: per_sample((outputs - one_hot(targets, outputs)) ** 2) / 2


@register_cost("mean_squared")
class MeanSquared(Cost):
    """The mean of (output - target)² over the units."""

    def build(self, activation: str) -> Losses:
        return lambda outputs, targets: ((outputs - one_hot(targets, outputs)) ** 2).flatten(1).mean(dim=1)


@register_cost("absolute")
class Absolute(Cost):
    """Σ |output - target| over the units."""

    def build(self, activation: str) -> Losses:
        return lambda outputs, targets: per_sample((outputs - one_hot(targets, outputs)).abs())


@register_cost("cross_covariance")
class CrossCovariance(Cost):
    """½ Σ C², where C is the covariance, over the batch, of each of the first `split` units with each of the others.

    It takes no targets: what the others say is then not what the first say (Cheung et al. 2014).
    """

    of_batch: ClassVar[bool] = True

    split: int = Field(ge=1, description="how many units there are in the first part")

    def build(self, activation: str) -> Callable[[Tensor, Tensor, SumOverRanks], Tensor]:
        return self._of_batch

    def _of_batch(self, outputs: Tensor, targets: Tensor, total: SumOverRanks) -> Tensor:
        """The same number for each sample, so that their mean is the cost."""
        count = total(outputs.new_tensor(float(len(outputs))))
        centred = outputs - total(outputs.sum(dim=0)) / count
        covariance = total(centred[:, : self.split].T @ centred[:, self.split :]) / count
        return (covariance * covariance).sum().div(2).expand(len(outputs))
