"""`NamedMetric`: a metric of torchmetrics by its name, applied to the outputs of a model and the targets of a data set.

torchmetrics is imported when a metric is used, not before: TorchMN does not need it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchmn.errors import nearest

PACKAGES = ("classification", "regression")
"""The packages of torchmetrics whose metrics compare outputs with targets, and neither download nor run anything."""
_INSTALL = "pip install 'torchmetrics>=1.4'"
_PROBABILITIES = ("softmax", "logistic")


@dataclass(frozen=True)
class NamedMetric:
    """A metric of torchmetrics.

    Attributes:
        name: of the class, in torchmetrics: "classification.MulticlassF1Score".
        arguments: of the class. The number of classes or labels is the number of outputs, unless it is given.
    """

    name: str
    arguments: Mapping[str, Any]

    def value(self, outputs: Tensor, targets: Tensor, activation: str) -> Tensor:
        """Returns the metric of these samples, 0-d; NaN if an output is NaN.

        Args:
            outputs: (samples, units, ...)
            targets: labels of shape (samples,), or values of the outputs' shape.
            activation: of the outputs; unless it is softmax or logistic, metrics of classes take scores for outputs.

        Raises:
            ValueError: if torchmetrics is missing, or has no such metric, or the metric is not one number.
        """
        metric = self._build(outputs.shape[1])
        if outputs.isnan().any():
            return torch.tensor(float("nan"))
        metric.update(*_arguments(type(metric).__name__, outputs.detach().cpu(), targets.cpu(), activation))
        result = metric.compute()
        if not isinstance(result, Tensor) or result.numel() != 1:
            got = f"{result.numel()} numbers" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            raise ValueError(f"expected {self.name} to be one number, got {got}: use average: macro, or another metric")
        return result.reshape(())

    def check(self, outputs: Tensor, targets: Tensor, activation: str) -> None:
        """Raises an error if the metric cannot be computed of such outputs and targets, a few of which are given."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a few samples do not have all classes
            try:
                self.value(outputs, targets, activation)
            except RuntimeError as error:  # torchmetrics' kind for shapes and values that do not fit
                raise ValueError(f"{self.name}: {error}") from error

    def _build(self, units: int) -> Any:
        cls = _class_named(self.name)
        parameters = inspect.signature(cls).parameters
        sizes = {name: units for name in ("num_classes", "num_labels") if name in parameters}
        try:
            # All ranks compute it of the same samples: a default process group of torch must not add them up.
            return cls(**{**sizes, **self.arguments}, sync_on_compute=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from error


def _class_named(name: str) -> Any:
    try:
        torchmetrics = import_module("torchmetrics")
    except ImportError as error:
        raise ValueError(f"{name} needs torchmetrics, which is not installed: {_INSTALL}") from error
    package, _, attribute = name.removeprefix("torchmetrics.").rpartition(".")
    if package not in ("", *PACKAGES):
        raise ValueError(f"expected a metric of torchmetrics.{' or torchmetrics.'.join(PACKAGES)}, got {name!r}")
    module = import_module(f"torchmetrics.{package}") if package else torchmetrics
    found = getattr(module, attribute, None)
    if not _is_metric(found, torchmetrics):
        names = [known for known, value in vars(module).items() if _is_metric(value, torchmetrics)]
        raise ValueError(
            f"torchmetrics has no metric {name!r} that compares outputs with targets. {_near(name, names)}"
        )
    return found


def _is_metric(value: object, torchmetrics: Any) -> bool:
    if not inspect.isclass(value) or not issubclass(value, torchmetrics.Metric):
        return False
    return value.__module__.split(".")[1:2] in [[package] for package in PACKAGES]


def _near(name: str, names: list[str]) -> str:
    text = nearest(name.rpartition(".")[2], names)
    return text if text.startswith("Did") else "docs: https://lightning.ai/docs/torchmetrics"


def _arguments(kind: str, outputs: Tensor, targets: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns what `update` of a metric takes; `kind` is the name of its class.

    Metrics of classes get probabilities: from other numbers torchmetrics would compute them with softmax, but only if
    one of them is outside of 0 to 1.
    """
    if kind.startswith("Multiclass"):
        labels = targets.argmax(dim=1) if targets.is_floating_point() else targets
        return _probabilities(outputs, activation, "softmax"), labels
    if kind.startswith("Multilabel"):
        return _probabilities(outputs, activation, "logistic"), targets.long()
    if kind.startswith("Binary"):
        p = _probabilities(outputs, activation, "softmax" if outputs.shape[1] == 2 else "logistic")
        return p[:, -1].flatten(), targets.long().flatten()
    outputs = outputs.reshape(targets.shape) if outputs.numel() == targets.numel() else outputs
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        return outputs[:, 0], targets.to(outputs.dtype).reshape(-1)
    return outputs, targets.to(outputs.dtype)


def _probabilities(outputs: Tensor, activation: str, wanted: str) -> Tensor:
    if activation not in _PROBABILITIES:
        outputs = outputs.double().softmax(dim=1) if wanted == "softmax" else outputs.double().sigmoid()
    return outputs.clamp(0, 1)  # a rounded probability may be above 1
