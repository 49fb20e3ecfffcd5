"""Reads the metrics that an evaluator returns, and combines those of all ranks: weighted means, sums, torchmetrics."""

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
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.errors import MismatchError
from torchmn.training.torchmetrics_sync import MetricCopy, compute_from_all, is_torchmetrics


@dataclass(frozen=True)
class Sum:
    """Marks a metric that is summed over ranks instead of averaged, such as a count or a confusion matrix.

    Attributes:
        value: this rank's number or tensor.
    """

    value: Any


@dataclass(frozen=True)
class RankMetric:
    """One metric of one rank: a mean over `samples` samples (None: unknown), a sum, or a `MetricCopy`."""

    value: Any
    samples: float | None
    is_sum: bool = False

    @property
    def kind(self) -> tuple:
        """Must be equal on all ranks that have the metric."""
        if isinstance(self.value, MetricCopy):
            return "torchmetrics", type(self.value.metric).__name__
        shape = f"tensor of shape {tuple(self.value.shape)}" if isinstance(self.value, Tensor) else "number"
        return ("sum" if self.is_sum else "mean"), shape


@dataclass
class RankResult:
    """The result of an evaluation on one rank, by name; of a result that is not a dict, the name is "".

    `stream_lengths` has the number of items of each iterable data set that was evaluated, as far as it is known.
    """

    metrics: dict[str, RankMetric]
    is_dict: bool = True
    stream_lengths: tuple[int | None, ...] = ()


def read(result: object, samples: float | None) -> tuple[RankResult, str | None]:
    """Returns the metrics in the result of an evaluator, and the problem with it or None.

    Args:
        result: what the evaluator returned.
        samples: the number of samples, unless the result has it.

    Returns:
        The metrics, and a text or None.
    """
    if isinstance(result, tuple) and len(result) == 2:
        samples, problem = _number_of_samples(result[1])
        result = result[0]
        if problem:
            return RankResult({}), problem
    if result is None:
        return RankResult({}), None
    is_dict = isinstance(result, Mapping)
    values: Mapping[str, Any] = result if isinstance(result, Mapping) else {"": result}
    found: dict[str, RankMetric] = {}
    for key, value in values.items():
        if value is None:
            continue
        if is_torchmetrics(value):
            found[key] = RankMetric(MetricCopy.of(value), None)
            continue
        metric, problem = read_one(value, samples)
        if metric is None:
            return RankResult({}), f"metric {key!r}: {problem}" if is_dict else problem
        found[key] = metric
    return RankResult(found, is_dict), None


def read_one(value: Any, samples: float | None) -> tuple[RankMetric | None, str | None]:
    """Returns one metric, or None and the problem with it."""
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
        with suppress(TypeError):  # arrays of strings or objects, refused below
            # Copied, because torch supports neither negative strides nor foreign byte order.
            value = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
    if isinstance(value, Tensor):
        problem = _tensor_problem(value)
        if problem:
            return None, problem
        value = value.detach().to_dense().cpu()
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.shape == ():
        value = value.item()
    if isinstance(value, Tensor | bool | int | float):
        return RankMetric(value, samples, is_sum), None
    return None, (
        f"expected a number or a tensor, a pair (mean, number of samples) of these, or a torchmn.training.Sum, "
        f"got {arguments.describe(value)}"
    )


def _tensor_problem(x: Tensor) -> str | None:
    """Returns why a tensor has no mean, or None."""
    if x.is_nested or x.is_quantized or x.is_meta:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else "meta"
        return f"expected a tensor with values, got a {kind} tensor"
    return None


def _number_of_samples(given: Any) -> tuple[float | None, str | None]:
    """Returns the number, and the problem with it or None."""
    number: Any = given.item() if isinstance(given, Tensor | np.ndarray | np.generic) and given.shape == () else given
    is_number = isinstance(number, int | float) and not isinstance(number, bool) and isfinite(number)
    if is_number and number >= 0 and number == int(number):
        return number, None
    # Usually a pair of two metrics: (loss, accuracy).
    return None, (
        f"expected a pair to be (mean, number of samples), got {arguments.describe(given)} as the number. Return "
        "several metrics as a dict, {'loss': loss, 'accuracy': accuracy}"
    )


def combine(ranks: Sequence[RankResult], equal: bool, operation: str) -> Any:
    """Returns the metrics of all ranks combined: a dict, or one number if the ranks returned one.

    Args:
        ranks: the results of all ranks, the same on every rank. Ranks that lack a metric do not count for it.
        equal: give all ranks the same weight, instead of their numbers of samples.
        operation: rank and operation, for messages.

    Returns:
        The combined metrics, the same on every rank.

    Raises:
        MismatchError: if kinds of results or metrics, or the lengths of iterable data sets, differ between ranks, or a
            number of samples is unknown.
    """
    for lengths in zip(*(result.stream_lengths for result in ranks), strict=False):
        if len(set(lengths) - {None}) > 1:
            raise MismatchError(
                f"{operation}: the iterable data set that ranks divide has another number of items on each: "
                f"{', '.join(f'{length} on rank {rank}' for rank, length in enumerate(lengths))}. Every rank must "
                "iterate over the same items"
            )
    filled = [result for result in ranks if result.metrics]
    if len({result.is_dict for result in filled}) > 1:
        raise MismatchError(f"{operation}: some ranks returned one number and others a dict; return the same kind")
    names = dict.fromkeys(name for result in ranks for name in result.metrics)
    combined = {}
    for name in names:
        by_rank = {rank: result.metrics[name] for rank, result in enumerate(ranks) if name in result.metrics}
        combined[name] = _combine_one(f"metric {name!r}" if name else "the result", by_rank, equal, operation)
    return combined if not filled or filled[0].is_dict else combined[""]


def _combine_one(title: str, by_rank: dict[int, RankMetric], equal: bool, operation: str) -> Any:
    first = next(iter(by_rank.values()))
    differing = {rank: metric.kind for rank, metric in by_rank.items() if metric.kind != first.kind}
    if differing:
        raise MismatchError(
            f"{operation}: {title} is not the same kind of metric on all ranks: {first.kind} on rank "
            f"{next(iter(by_rank))}, but {differing}"
        )
    if isinstance(first.value, MetricCopy):
        return compute_from_all([metric.value for metric in by_rank.values()])
    if first.is_sum:
        return _total([metric.value for metric in by_rank.values()])
    # A rank without samples may return nan, which would remain with a weight of 0.
    counted = {rank: metric for rank, metric in by_rank.items() if metric.samples != 0}
    if len(counted) == 1:
        return next(iter(counted.values())).value
    if not counted:
        return float("nan")
    unknown = [rank for rank, metric in counted.items() if metric.samples is None]
    if unknown and not equal:
        raise MismatchError(
            f"{operation}: {title} is a mean from ranks {ranks_text(sorted(by_rank))}, but rank {ranks_text(unknown)} "
            "did not return its number of samples; a mean of means would be wrong if these numbers differ. Return "
            "`metrics, number_of_samples`, or {'name': (mean, number_of_samples)}; or let the function take the "
            "DataLoader as an argument, whose samples are counted; or pass weights='equal' if the numbers are equal."
        )
    weights = [1.0 if equal else float(metric.samples or 0) for metric in counted.values()]
    return weighted_mean([metric.value for metric in counted.values()], weights)


def _total(values: Sequence[Any]) -> Any:
    """Returns the sum, of tensors in a dtype wide enough: small integers would overflow, bools stay bools."""
    if not isinstance(values[0], Tensor):
        return sum(values)
    dtype = values[0].dtype
    if dtype.is_complex:
        wide, result = torch.complex128, dtype
    elif dtype.is_floating_point:
        wide, result = torch.float64, dtype if dtype.itemsize >= 4 else torch.float32
    else:
        wide = result = torch.int64
    return torch.stack([value.to(wide) for value in values]).sum(0).to(result)


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Returns Σ weight·value / Σ weight, computed in float64."""
    total = sum(weights)
    if not isinstance(values[0], Tensor):
        return sum(weight * value for value, weight in zip(values, weights, strict=True)) / total
    wide = torch.complex128 if values[0].is_complex() else torch.float64
    mean = sum(value.to(wide) * (weight / total) for value, weight in zip(values, weights, strict=True))
    assert isinstance(mean, Tensor)
    inexact = values[0].is_floating_point() or values[0].is_complex()
    return mean.to(values[0].dtype) if inexact else mean
