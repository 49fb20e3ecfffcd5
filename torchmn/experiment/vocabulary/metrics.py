"""Metrics: numbers about outputs and targets of a whole data set, exact at any number of ranks.

`build(activation)` gives a Measure. A measure is a sum over samples, which ranks add up; or, where that is not
enough (the area under a curve), it asks for all outputs. A function of outputs and targets that gives one number per
sample does too: its mean is the metric.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from torchmn.experiment.file.fields import Count, UnitsField
from torchmn.experiment.file.registry import Options, register_metric
from torchmn.experiment.file.registry import metrics as registered
from torchmn.experiment.vocabulary.costs import check_per_sample, one_hot, per_sample
from torchmn.experiment.vocabulary.scores import Outputs, Probabilities, Source, logarithms


class Measure(ABC):
    """How a metric is computed: either from sums over samples, or (`needs_all`) from all samples at once."""

    needs_all: ClassVar[bool] = False
    percent: ClassVar[bool] = False
    source: Source | None = None
    """Where its probabilities come from: then `of` is given Probabilities, and not outputs."""

    @abstractmethod
    def of(self, outputs: Any, targets: Tensor) -> Tensor:
        """One number per sample; with `needs_all`, the number itself."""

    def finish(self, total: float, samples: int) -> float:
        """The metric, from the sum over all samples."""
        return total / samples if samples else float("nan")

    def seen(self, outputs: Outputs) -> Tensor | Probabilities:
        """What `of` is given of the outputs."""
        return outputs.values if self.source is None else self.source.probabilities(outputs.scores)


class Metric(Options):
    """A metric by its name.

    compares: it is about targets with as many values as the outputs; of_classes: it is about classes
    of_probabilities: after softmax or logistic it takes Probabilities
    """

    compares: ClassVar[bool] = False
    of_classes: ClassVar[bool] = False
    of_probabilities: ClassVar[bool] = False

    units: UnitsField = Field(None, description="of which outputs it is, as [0, 10]; of all, if it is not said")
    outputs: Literal["scores", "probabilities"] | None = Field(
        None, description="what the units are; if it is not said, that follows from the last activation"
    )

    def build(self, activation: str) -> Measure | Callable[[Tensor, Tensor], Tensor]:
        raise NotImplementedError


registered.base_of_functions = Metric


def labelled(metrics: Sequence[Options]) -> dict[str, Options]:
    """Metrics by what they are called in tables: the name, with the options that it was given.

    Of which units it is stands there only where another metric would be called the same.
    """
    short = [_label(metric, {"units", "outputs"}) for metric in metrics]
    return {
        name if short.count(name) == 1 else _label(metric, set()): metric
        for name, metric in zip(short, metrics, strict=True)
    }


def _label(metric: Options, without: set[str]) -> str:
    said = metric.model_dump(exclude_defaults=True, exclude=without)
    values = {key: "-".join(map(str, value)) if isinstance(value, tuple) else value for key, value in said.items()}
    return " ".join([metric.kind, *(f"{key} {value}" for key, value in values.items())])


class PerSample(Measure):
    """The mean of what a function says of each sample."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], name: str):
        self.function, self.name = function, name

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        values = self.function(outputs, targets)
        check_per_sample(values, outputs, self.name)
        return values


class OfUnits(Measure):
    """A measure of some of the outputs."""

    def __init__(self, measure: Measure, units: tuple[int, int]):
        self.measure, self.units = measure, units
        self.needs_all, self.percent = measure.needs_all, measure.percent  # type: ignore[misc]

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.measure.of(outputs[:, self.units[0] : self.units[1]], targets)

    def finish(self, total: float, samples: int) -> float:
        return self.measure.finish(total, samples)


def measure_of(metric: Options, activation: str, source: Source | None = None) -> Measure:
    """How a metric is computed, of the units that it names, or of the probabilities of a source."""
    units = getattr(metric, "units", None)
    measure = metric.build(activation)
    if not isinstance(measure, Measure):
        measure = PerSample(measure, f"{metric.where}: {metric.kind}")
    if source is not None:
        measure.source = source
        return measure
    return measure if units is None else OfUnits(measure, units)


def class_logarithms(outputs: Tensor | Probabilities, activation: str) -> Tensor:
    """Log-probabilities of the classes, whose probabilities sum to 1."""
    if activation in ("softmax", "logistic"):
        log = logarithms(outputs).log
        return log - log.logsumexp(dim=1, keepdim=True)
    assert isinstance(outputs, Tensor)
    return functional.log_softmax(outputs, dim=1)


class Misclassification(Measure):
    def __init__(self, top: int, kind: str):
        self.top, self.kind = top, kind
        self.percent = kind in ("misclassified", "accuracy")  # type: ignore[misc]

    def of(self, outputs: Tensor | Probabilities, targets: Tensor) -> Tensor:
        if isinstance(outputs, Probabilities):
            outputs = outputs.log  # of which fewer are equal
        labels = targets if not targets.is_floating_point() else targets.argmax(dim=1)
        best = outputs.topk(min(self.top, outputs.shape[1]), dim=1).indices
        # Which of several NaN is the largest depends on the batch, and so on the ranks: they are right about nothing.
        right = (best == labels.unsqueeze(1)).any(dim=1) & ~outputs.isnan().any(dim=1)
        return (right if self.kind == "accuracy" else ~right).double()

    def finish(self, total: float, samples: int) -> float:
        share = super().finish(total, samples)
        return {"misclassified_sum": total, "misclassified_percentage": 100 * share}.get(self.kind, share)


class _Misclassified(Metric):
    of_classes: ClassVar[bool] = True
    of_probabilities: ClassVar[bool] = True

    top: Count = 1
    """The right class may be any of the `top` best."""

    def build(self, activation: str) -> Measure:
        return Misclassification(self.top, self.kind)


@register_metric("misclassified", "misclassified_rate")
class Misclassified(_Misclassified):
    """The share of samples in a wrong class."""


@register_metric("misclassified_sum")
class MisclassifiedSum(_Misclassified):
    """How many samples are in a wrong class."""


@register_metric("misclassified_percentage")
class MisclassifiedPercentage(_Misclassified):
    """The share of samples in a wrong class, in percent."""


@register_metric("accuracy")
class Accuracy(_Misclassified):
    """The share of samples in the right class."""


class _LogLoss(Measure):
    def __init__(self, activation: str, is_sum: bool):
        self.activation, self.is_sum = activation, is_sum

    def of(self, outputs: Tensor | Probabilities, targets: Tensor) -> Tensor:
        log = class_logarithms(outputs, self.activation)
        return -per_sample(one_hot(targets, log) * log).double()

    def finish(self, total: float, samples: int) -> float:
        return total if self.is_sum else super().finish(total, samples)


@register_metric("log_loss", "log_loss_mean")
class LogLoss(Metric):
    """The mean of -log of the probability of the right class."""

    of_classes: ClassVar[bool] = True
    of_probabilities: ClassVar[bool] = True

    def build(self, activation: str) -> Measure:
        return _LogLoss(activation, is_sum=False)


@register_metric("log_loss_sum")
class LogLossSum(Metric):
    """The sum of -log of the probability of the right class."""

    of_classes: ClassVar[bool] = True
    of_probabilities: ClassVar[bool] = True

    def build(self, activation: str) -> Measure:
        return _LogLoss(activation, is_sum=True)


class _Squares(Measure):
    def __init__(self, is_sum: bool):
        self.is_sum = is_sum

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        squares = (outputs - one_hot(targets, outputs)).double().flatten(1) ** 2
        return squares.sum(dim=1) if self.is_sum else squares.mean(dim=1)

    def finish(self, total: float, samples: int) -> float:
        return total if self.is_sum else super().finish(total, samples)


@register_metric("sse")
class SSE(Metric):
    """The sum of squared errors over all samples and units."""

    compares: ClassVar[bool] = True

    def build(self, activation: str) -> Measure:
        return _Squares(is_sum=True)


@register_metric("mse")
class MSE(Metric):
    """The mean of squared errors over all samples and units."""

    compares: ClassVar[bool] = True

    def build(self, activation: str) -> Measure:
        return _Squares(is_sum=False)


class _AUC(Measure):
    needs_all = True

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over classes that occur (and are not all) of the area under their curve."""
        wanted = one_hot(targets, outputs).bool()
        if outputs.shape[1] == 2 and not targets.is_floating_point():
            outputs, wanted = (outputs[:, 1:] - outputs[:, :1]), wanted[:, 1:]
        areas = [
            area(outputs[:, k], wanted[:, k]) for k in range(outputs.shape[1]) if 0 < wanted[:, k].sum() < len(wanted)
        ]
        return torch.stack(areas).mean() if areas else torch.tensor(float("nan"), dtype=torch.float64)


def area(values: Tensor, positive: Tensor) -> Tensor:
    """The probability that a positive sample has a larger value than a negative one; ties count half."""
    unique, place = values.unique(return_inverse=True)
    counts = torch.bincount(place, minlength=len(unique)).double()
    rank = counts.cumsum(0) - (counts - 1) / 2  # the mean rank among equals
    positives = positive.sum().double()
    negatives = len(values) - positives
    return (rank[place][positive].sum() - positives * (positives + 1) / 2) / (positives * negatives)


@register_metric("auc")
class AUC(Metric):
    """The area under the ROC curve; with several classes, the mean of each against the rest."""

    of_classes: ClassVar[bool] = True

    def build(self, activation: str) -> Measure:
        return _AUC()
