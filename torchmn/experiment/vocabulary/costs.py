"""Costs that training minimises. `build(activation)` returns a function of outputs and targets.

The function returns one loss per sample, so that each rank sums its losses and divides by the global batch size.

    outputs: (batch, units, ...)
    targets: labels of shape (batch,), or values of the outputs' shape

A cost with `of_probabilities` receives `Probabilities` instead of outputs after softmax or logistic. A cost of the
whole batch (`of_batch`) receives a third argument: a function that sums a tensor over the ranks that share the batch.
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
from torchmn.experiment.vocabulary.scores import Probabilities, as_probabilities

Losses = Callable[[Any, Tensor], Tensor]
SumOverRanks = Callable[[Tensor], Tensor]


class Cost(Options):
    """Base class of costs, with the options that let a model have several: weight, units, and target."""

    of_batch: ClassVar[bool] = False
    of_probabilities: ClassVar[bool] = False

    scale: Positive = Field(1.0, description="factor of this cost in the sum of costs")
    units: UnitsField = Field(None, description="the outputs that it applies to, such as [0, 10]; default: all")
    target: Literal["labels", "inputs"] | None = Field(
        None, description="what the outputs are compared with; default: the target of the model"
    )
    outputs: Literal["scores", "probabilities"] | None = Field(
        None, description="what the units are; default: derived from the last activation"
    )


registered.function_base = Cost


def one_hot(targets: Tensor, outputs: Tensor) -> Tensor:
    """Returns targets as values of the outputs' shape; labels are converted to one-hot rows."""
    if targets.is_floating_point():
        return targets.to(outputs.dtype).reshape(outputs.shape)
    return functional.one_hot(targets, outputs.shape[1]).to(outputs.dtype)


def per_sample(values: Tensor) -> Tensor:
    """Returns the sum over all dims but the batch, of shape (batch,)."""
    return values.flatten(1).sum(dim=1)


def check_per_sample(values: Tensor, outputs: Tensor, name: str) -> None:
    """Raises an ExperimentError unless a cost or metric has one value per sample: means of ranks cannot be combined."""
    if values.shape != outputs.shape[:1]:
        raise ExperimentError(
            f"{name}: expected one number per sample, of shape ({len(outputs)},), got {tuple(values.shape)}: use "
            "reduction='none', and sum over all dims but the first"
        )


def binary_of_scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns -Σ t log p + (1-t) log(1-p) of each sample, where p is the logistic function of an output."""
    expected = one_hot(targets, outputs)
    return per_sample(functional.binary_cross_entropy_with_logits(outputs, expected, reduction="none"))


def binary_of_probabilities(outputs: Tensor | Probabilities, targets: Tensor) -> Tensor:
    """Returns -Σ t log p + (1-t) log(1-p) of each sample."""
    p = as_probabilities(outputs)
    log = p.log
    expected = one_hot(targets, log)
    return -per_sample(expected * log + (1 - expected) * p.log_complement)


@register_cost("cross_entropy")
class CrossEntropy(Cost):
    """-log of the probability of the correct class.

    Outputs are logits; after `softmax` they are probabilities of classes, and after `logistic` each unit is an
    independent probability (binary cross-entropy).
    """

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
        log = as_probabilities(outputs).log
        return -per_sample(one_hot(targets, log) * log)


@register_cost("binary_cross_entropy")
class BinaryCrossEntropy(Cost):
    """-Σ t log p + (1-t) log(1-p) over the units. Outputs are logits, or probabilities after `logistic`."""

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

    It ignores targets, and makes the two groups of units uncorrelated (Cheung et al. 2014).
    """

    of_batch: ClassVar[bool] = True

    split: int = Field(ge=1, description="number of units in the first group")

    def build(self, activation: str) -> Callable[[Tensor, Tensor, SumOverRanks], Tensor]:
        return self._of_batch

    def _of_batch(self, outputs: Tensor, targets: Tensor, total: SumOverRanks) -> Tensor:
        """Returns the same value for each sample, so that their mean is the cost."""
        count = total(outputs.new_tensor(float(len(outputs))))
        centred = outputs - total(outputs.sum(dim=0)) / count
        covariance = total(centred[:, : self.split].T @ centred[:, self.split :]) / count
        return (covariance * covariance).sum().div(2).expand(len(outputs))
