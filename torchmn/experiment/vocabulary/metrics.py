"""Metrics of a whole data set, with the same values at any number of ranks.

`build(activation)` returns a `Measure`: a sum over samples, which is reduced over ranks, or (`needs_all`) a function of
all outputs, such as the area under a curve. It may also return a function of outputs and targets with one value per
sample, whose mean is the metric.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn import functional

from torchmn.experiment.file.fields import Count, UnitsField
from torchmn.experiment.file.registry import Options, register_metric
from torchmn.experiment.file.registry import metrics as registered
from torchmn.experiment.vocabulary.costs import check_per_sample, one_hot, per_sample
from torchmn.experiment.vocabulary.scores import Outputs, Probabilities, ProbabilitySource, as_probabilities
from torchmn.training.named_torchmetrics import NamedMetric


class Measure(ABC):
    """Base class for the computation of a metric, from sums over samples or (`needs_all`) from all samples at once.

    Attributes:
        needs_all: whether `of` must be called once, with the samples of all ranks.
        percent: whether the value is a fraction that tables show in percent.
        source: where the probabilities that `of` receives instead of outputs come from; None if it receives outputs.
    """

    needs_all: bool = False
    percent: bool = False
    source: ProbabilitySource | None = None

    @abstractmethod
    def of(self, outputs: Any, targets: Tensor) -> Tensor:
        """Returns one value per sample; with `needs_all`, the metric.

        Args:
            outputs: (samples, units, ...)
            targets: labels of shape (samples,), or values of the outputs' shape.

        Returns:
            A tensor with an element per sample; 0-d with `needs_all`.
        """

    def finish(self, total: float, samples: int) -> float:
        """Returns the metric, given the sum of `of` over all samples; by default the mean."""
        return total / samples if samples else float("nan")

    def select(self, outputs: Outputs) -> Tensor | Probabilities:
        """Returns the first argument of `of` for these outputs."""
        return outputs.values if self.source is None else self.source.probabilities(outputs.scores)


class MetricOptions(Options):
    """Base class of metrics.

    Attributes:
        compares: whether it needs targets with as many values as the outputs.
        of_classes: whether it needs targets that are classes.
        of_probabilities: whether its measure receives `Probabilities` after softmax or logistic.
    """

    compares: ClassVar[bool] = False
    of_classes: ClassVar[bool] = False
    of_probabilities: ClassVar[bool] = False

    units: UnitsField = Field(None, description="the outputs that it applies to, such as [0, 10]; default: all")
    outputs: Literal["scores", "probabilities"] | None = Field(
        None, description="what the units are; default: derived from the last activation"
    )

    def build(self, activation: str) -> Measure | Callable[[Tensor, Tensor], Tensor]:
        raise NotImplementedError

    def check(self, outputs: Tensor, targets: Tensor, activation: str) -> None:
        """Raises an error if the metric cannot be computed of such outputs; by default, nothing is checked.

        Args:
            outputs: (samples, units, ...), of a few samples: zeros.
            targets: of the same samples.
            activation: of the outputs.
        """


registered.function_base = MetricOptions


def by_label(metrics: Sequence[Options]) -> dict[str, Options]:
    """Returns metrics by their labels in tables: the name and the options that differ from the defaults.

    `units` and `outputs` are part of a label only if another metric would have the same label without them.
    """
    short = [_label(metric, {"units", "outputs"}) for metric in metrics]
    return {
        name if short.count(name) == 1 else _label(metric, set()): metric
        for name, metric in zip(short, metrics, strict=True)
    }


def _label(metric: Options, without: set[str]) -> str:
    options = metric.model_dump(exclude_defaults=True, exclude=without)
    arguments = options.pop("arguments", {})
    options |= arguments if isinstance(arguments, dict) else {"arguments": arguments}
    # `torchmetrics: classification.MulticlassF1Score` is the name of the metric, and not an option.
    name = str(options.pop(metric.kind, metric.kind)).rpartition(".")[2]
    values = {key: "-".join(map(str, value)) if isinstance(value, tuple) else value for key, value in options.items()}
    return " ".join([name, *(f"{key} {value}" for key, value in values.items())])


class PerSample(Measure):
    """The mean of a function with one value per sample."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], name: str):
        self.function, self.name = function, name

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        values = self.function(outputs, targets)
        check_per_sample(values, outputs, self.name)
        return values


class OfUnits(Measure):
    """A measure applied to some of the outputs."""

    def __init__(self, measure: Measure, units: tuple[int, int]):
        self.measure, self.units = measure, units
        self.needs_all, self.percent = measure.needs_all, measure.percent

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.measure.of(outputs[:, self.units[0] : self.units[1]], targets)

    def finish(self, total: float, samples: int) -> float:
        return self.measure.finish(total, samples)


def build_measure(metric: Options, activation: str, source: ProbabilitySource | None = None) -> Measure:
    """Returns the measure of a metric, for the units in its options or for the probabilities of a source."""
    units = getattr(metric, "units", None)
    measure = metric.build(activation)
    if not isinstance(measure, Measure):
        measure = PerSample(measure, f"{metric.where}: {metric.kind}")
    if source is not None:
        measure.source = source
        return measure
    return measure if units is None else OfUnits(measure, units)


def class_log_probabilities(outputs: Tensor | Probabilities, activation: str) -> Tensor:
    """Returns log-probabilities of classes, normalised so that the probabilities sum to 1: (samples, classes)."""
    if activation in ("softmax", "logistic"):
        log = as_probabilities(outputs).log
        return log - log.logsumexp(dim=1, keepdim=True)
    assert isinstance(outputs, Tensor)
    return functional.log_softmax(outputs, dim=1)


class Misclassification(Measure):
    """Counts correct or wrong classes among the `top` largest outputs; `kind` is the metric's name."""

    def __init__(self, top: int, kind: str):
        self.top, self.kind = top, kind
        self.percent = kind in ("misclassified", "accuracy")

    def of(self, outputs: Tensor | Probabilities, targets: Tensor) -> Tensor:
        if isinstance(outputs, Probabilities):
            outputs = outputs.log  # has fewer ties than rounded probabilities
        labels = targets if not targets.is_floating_point() else targets.argmax(dim=1)
        best = outputs.topk(min(self.top, outputs.shape[1]), dim=1).indices
        # topk of several NaN depends on the batch, and so on the number of ranks: samples with NaN count as wrong.
        correct = (best == labels.unsqueeze(1)).any(dim=1) & ~outputs.isnan().any(dim=1)
        return (correct if self.kind == "accuracy" else ~correct).double()

    def finish(self, total: float, samples: int) -> float:
        fraction = super().finish(total, samples)
        return {"misclassified_sum": total, "misclassified_percentage": 100 * fraction}.get(self.kind, fraction)


class _MisclassifiedOptions(MetricOptions):
    of_classes: ClassVar[bool] = True
    of_probabilities: ClassVar[bool] = True

    top: Count = Field(1, description="a sample is correct if its class is among so many largest outputs")

    def build(self, activation: str) -> Measure:
        return Misclassification(self.top, self.kind)


@register_metric("misclassified", "misclassified_rate")
class Misclassified(_MisclassifiedOptions):
    """The fraction of misclassified samples."""


@register_metric("misclassified_sum")
class MisclassifiedSum(_MisclassifiedOptions):
    """The number of misclassified samples."""


@register_metric("misclassified_percentage")
class MisclassifiedPercentage(_MisclassifiedOptions):
    """The percentage of misclassified samples."""


@register_metric("accuracy")
class Accuracy(_MisclassifiedOptions):
    """The fraction of correctly classified samples."""


class _SumOrMean(Measure):
    def __init__(self, is_sum: bool):
        self.is_sum = is_sum

    def finish(self, total: float, samples: int) -> float:
        return total if self.is_sum else super().finish(total, samples)


class _LogLossMeasure(_SumOrMean):
    def __init__(self, activation: str, is_sum: bool):
        super().__init__(is_sum)
        self.activation = activation

    def of(self, outputs: Tensor | Probabilities, targets: Tensor) -> Tensor:
        log = class_log_probabilities(outputs, self.activation)
        return -per_sample(one_hot(targets, log) * log).double()


@register_metric("log_loss", "log_loss_mean")
class LogLoss(MetricOptions):
    """The mean of -log of the probability of the correct class."""

    of_classes: ClassVar[bool] = True
    of_probabilities: ClassVar[bool] = True

    def build(self, activation: str) -> Measure:
        return _LogLossMeasure(activation, is_sum=self.kind == "log_loss_sum")


@register_metric("log_loss_sum")
class LogLossSum(LogLoss):
    """The sum of -log of the probability of the correct class."""


class _SquaredErrors(_SumOrMean):
    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        squares = (outputs - one_hot(targets, outputs)).double().flatten(1) ** 2
        return squares.sum(dim=1) if self.is_sum else squares.mean(dim=1)


@register_metric("mse")
class MSE(MetricOptions):
    """The mean of squared errors over all samples and units."""

    compares: ClassVar[bool] = True

    def build(self, activation: str) -> Measure:
        return _SquaredErrors(is_sum=self.kind == "sse")


@register_metric("sse")
class SSE(MSE):
    """The sum of squared errors over all samples and units."""


class _AUC(Measure):
    needs_all = True

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean area over the classes that some, but not all, samples belong to; NaN if there is none."""
        positive = one_hot(targets, outputs).bool()
        if outputs.shape[1] == 2 and not targets.is_floating_point():
            outputs, positive = (outputs[:, 1:] - outputs[:, :1]), positive[:, 1:]
        areas = [
            area_under_curve(outputs[:, k], positive[:, k])
            for k in range(outputs.shape[1])
            if 0 < positive[:, k].sum() < len(positive)
        ]
        return torch.stack(areas).mean() if areas else torch.tensor(float("nan"), dtype=torch.float64)


def area_under_curve(values: Tensor, positive: Tensor) -> Tensor:
    """Returns the probability that a positive sample has a larger value than a negative one; ties count half.

    Args:
        values: (samples,)
        positive: (samples,), bool; neither all true nor all false.

    Returns:
        A 0-d tensor between 0 and 1.
    """
    unique, inverse = values.unique(return_inverse=True)
    counts = torch.bincount(inverse, minlength=len(unique)).double()
    rank = counts.cumsum(0) - (counts - 1) / 2  # the mean rank of equal values
    positives = positive.sum().double()
    negatives = len(values) - positives
    return (rank[inverse][positive].sum() - positives * (positives + 1) / 2) / (positives * negatives)


@register_metric("auc")
class AUC(MetricOptions):
    """The area under the ROC curve; with several classes, the mean over classes, each against the rest."""

    of_classes: ClassVar[bool] = True

    def build(self, activation: str) -> Measure:
        return _AUC()


class _OfTorchmetrics(Measure):
    needs_all = True

    def __init__(self, metric: NamedMetric, activation: str):
        self.metric, self.activation = metric, activation

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.metric.value(outputs, targets, self.activation)


@register_metric("torchmetrics")
class Torchmetrics(MetricOptions):
    """A metric of torchmetrics, `{torchmetrics: classification.MulticlassF1Score, average: macro}`."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    torchmetrics: str = Field(description="a class of torchmetrics.classification or torchmetrics.regression")
    arguments: dict[str, Any] = Field(default_factory=dict, description="arguments of the class; may also be keys")

    @model_validator(mode="before")
    @classmethod
    def _collect_arguments(cls, values: dict[str, Any]) -> dict[str, Any]:
        known = {name: value for name, value in values.items() if name in cls.model_fields}
        others = {name: value for name, value in values.items() if name not in cls.model_fields}
        return {**known, "arguments": {**known.get("arguments", {}), **others}} if others else known

    @property
    def metric(self) -> NamedMetric:
        return NamedMetric(self.torchmetrics, self.arguments)

    def build(self, activation: str) -> Measure:
        return _OfTorchmetrics(self.metric, activation)

    def check(self, outputs: Tensor, targets: Tensor, activation: str) -> None:
        self.metric.check(outputs, targets, activation)
