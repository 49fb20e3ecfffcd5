"""Metrics of several ranks become one: means weighted by samples, sums added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchmn.communicators import arguments
from torchmn.communicators.watchdog.waits import ranks_text
from torchmn.errors import MismatchError
from torchmn.training.torchmetrics_sync import CarriedMetric, is_torchmetrics, value_of_all


@dataclass(frozen=True)
class Sum:
    """A metric that is added up over ranks instead of averaged: a count, a confusion matrix."""

    value: Any


@dataclass(frozen=True)
class Metric:
    """What one rank says of one metric: its mean over `samples` samples (None: nobody said how many), or its sum.

    A metric of torchmetrics is neither: it has the states from which it is computed.
    """

    value: Any
    samples: float | None
    is_sum: bool = False

    @property
    def kind(self) -> tuple:
        """What all ranks that have the metric must agree on."""
        if isinstance(self.value, CarriedMetric):
            return "torchmetrics", type(self.value.metric).__name__
        shape = f"tensor of shape {tuple(self.value.shape)}" if isinstance(self.value, Tensor) else "number"
        return ("sum" if self.is_sum else "mean"), shape


@dataclass
class Local:
    """What an evaluation gave on one rank. One number instead of a dict is kept under the name ""."""

    metrics: dict[str, Metric]
    is_dict: bool = True


def read(result: object, samples: float | None) -> tuple[Local, str | None]:
    """The metrics in what an evaluator returned, and the problem with it or None.

    `samples` is the weight where the result does not say one itself.
    """
    if isinstance(result, tuple) and len(result) == 2:
        samples, problem = _number_of_samples(result[1])
        result = result[0]
        if problem:
            return Local({}), problem
    if result is None:
        return Local({}), None
    is_dict = isinstance(result, Mapping)
    found: dict[str, Metric] = {}
    for key, value in (result if is_dict else {"": result}).items():  # type: ignore[union-attr]
        if value is None:
            continue
        if is_torchmetrics(value):
            found[key] = Metric(CarriedMetric.of(value), None)
            continue
        metric, problem = read_one(value, samples)
        if metric is None:
            return Local({}), f"metric {key!r}: {problem}" if is_dict else problem
        found[key] = metric
    return Local(found, is_dict), None


def read_one(value: Any, samples: float | None) -> tuple[Metric | None, str | None]:
    """One metric, or None and the problem with it."""
    is_sum = isinstance(value, Sum)
    if isinstance(value, Sum):
        value = value.value
    elif isinstance(value, tuple) and len(value) == 2:
        samples, problem = _number_of_samples(value[1])
        value = value[0]
        if problem:
            return None, problem
    if isinstance(value, np.ma.MaskedArray):
        return None, "expected numbers, got a masked array, whose mask would be lost: call .filled() or .compressed()"
    if isinstance(value, np.ndarray) and value.ndim > 0:
        with suppress(TypeError):  # of strings, or objects: refused below
            # A copy in plain order: torch knows neither negative strides nor another machine's byte order.
            value = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
    if isinstance(value, Tensor):
        problem = _tensor_problem(value)
        if problem:
            return None, problem
        value = value.detach().to_dense().cpu()
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.shape == ():
        value = value.item()
    if isinstance(value, Tensor):
        return Metric(value, samples, is_sum), None
    if isinstance(value, bool | int | float):
        return Metric(value, samples, is_sum), None
    return None, (
        f"expected a number or a tensor, a pair (mean, number of samples) of these, or a torchmn.training.Sum, "
        f"got {arguments.describe(value)}"
    )


def _tensor_problem(x: Tensor) -> str | None:
    """Why a tensor has no numbers to take the mean of, or None."""
    if x.is_nested or x.is_quantized or x.is_meta:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else "meta"
        return f"expected a tensor with numbers in it, got a {kind} one"
    return None


def _number_of_samples(given: Any) -> tuple[float | None, str | None]:
    """The number, and the problem with it or None."""
    number: Any = given.item() if isinstance(given, Tensor | np.ndarray | np.generic) and given.shape == () else given
    is_number = isinstance(number, int | float) and not isinstance(number, bool) and isfinite(number)
    if is_number and number >= 0 and number == int(number):
        return number, None
    # No number of samples, but another metric: (loss, accuracy).
    return None, (
        f"expected a pair to be (mean, number of samples), got {arguments.describe(given)} as the number. Return "
        "several metrics as a dict, {'loss': loss, 'accuracy': accuracy}"
    )


def combine(everyone: Sequence[Local], equal: bool, operation: str) -> Any:
    """The metrics of all ranks together, computed alike on every rank: a dict, or one number where all gave one.

    A metric that only some ranks have is combined over these. Raises on every rank where a weight is needed and
    nobody said it.
    """
    filled = [local for local in everyone if local.metrics]
    if len({local.is_dict for local in filled}) > 1:
        raise MismatchError(f"{operation}: some ranks returned one number and others a dict; return the same kind")
    names = dict.fromkeys(name for local in everyone for name in local.metrics)
    joined = {}
    for name in names:
        given = {rank: local.metrics[name] for rank, local in enumerate(everyone) if name in local.metrics}
        joined[name] = _join(f"metric {name!r}" if name else "the result", given, equal, operation)
    return joined if not filled or filled[0].is_dict else joined[""]


def _join(what: str, given: dict[int, Metric], equal: bool, operation: str) -> Any:
    first = next(iter(given.values()))
    differing = {rank: metric.kind for rank, metric in given.items() if metric.kind != first.kind}
    if differing:
        raise MismatchError(
            f"{operation}: {what} is not the same kind of thing on all ranks: {first.kind} on rank "
            f"{next(iter(given))}, but {differing}"
        )
    if isinstance(first.value, CarriedMetric):
        return value_of_all([metric.value for metric in given.values()])
    if first.is_sum:
        return _total([metric.value for metric in given.values()])
    # A rank without samples has no mean: what it returned may be a nan, which no weight of 0 makes harmless.
    counted = {rank: metric for rank, metric in given.items() if metric.samples != 0}
    if len(counted) == 1:
        return next(iter(counted.values())).value
    if not counted:
        return float("nan")
    silent = [rank for rank, metric in counted.items() if metric.samples is None]
    if silent and not equal:
        raise MismatchError(
            f"{operation}: {what} comes from ranks {ranks_text(sorted(given))}, and rank {ranks_text(silent)} did not "
            "say over how many samples it is the mean; a mean of means would be wrong where these numbers differ. "
            "Return `metrics, number_of_samples`, or {'name': (mean, number_of_samples)}; or let the function take "
            "the DataLoader as an argument, so that it can be asked; or pass weights='equal' if the numbers are equal."
        )
    weights = [1.0 if equal else float(metric.samples or 0) for metric in counted.values()]
    return weighted_mean([metric.value for metric in counted.values()], weights)


def _total(values: Sequence[Any]) -> Any:
    """The sum, of tensors in a dtype that has room for it: small integers would wrap around, bools stay bools."""
    if not isinstance(values[0], Tensor):
        return sum(values)
    dtype = values[0].dtype
    if dtype.is_complex:
        wide, room = torch.complex128, dtype
    elif dtype.is_floating_point:
        wide, room = torch.float64, dtype if dtype.itemsize >= 4 else torch.float32
    else:
        wide = room = torch.int64
    return torch.stack([value.to(wide) for value in values]).sum(0).to(room)


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Σ weight·value / Σ weight, in float64 whatever the values are."""
    total = sum(weights)
    if not isinstance(values[0], Tensor):
        return sum(weight * value for value, weight in zip(values, weights, strict=True)) / total
    wide = torch.complex128 if values[0].is_complex() else torch.float64
    mean = sum(value.to(wide) * (weight / total) for value, weight in zip(values, weights, strict=True))
    assert isinstance(mean, Tensor)
    inexact = values[0].is_floating_point() or values[0].is_complex()
    return mean.to(values[0].dtype) if inexact else mean
