"""`without_repeats` for an exact evaluation, which counts every item once, and the number of samples in a loader."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from torchmn.data import ScatteredDataset, ScatteredStream
from torchmn.errors import ArgumentError

# Copied to a new loader, besides batch size and order.
_LOADER_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip


def is_data(argument: object) -> bool:
    """Returns whether `argument` is a DataLoader or a data set, whose samples can be counted."""
    return isinstance(argument, DataLoader | Dataset)


def without_repeats(data: Any) -> Any:
    """Returns `data` without the items that `scatter_dataset` repeated to make lengths equal.

    The results of all ranks together have every item of the whole data set exactly once.

    Args:
        data: a DataLoader or a data set; returned unchanged if it has no repeated items.

    Returns:
        A DataLoader or data set like `data`.

    Raises:
        ArgumentError: if repeated items cannot be removed: of a loader with a custom sampler or a
            `DistributedSampler`, or inside another data set, such as a transform of a scattered one.
    """
    if isinstance(data, ScatteredDataset | ScatteredStream):
        return data.unique() if data.repeated else data
    if isinstance(data, DataLoader):
        dataset = without_repeats(data.dataset)
        _refuse_distributed_sampler(data)
        return data if dataset is data.dataset else _same_loader_over(dataset, data)
    hidden = next(_repeats_inside(data), None)
    if hidden is not None:
        raise ArgumentError(
            f"a {type(data).__name__} has {hidden} inside, whose repeated item would be counted twice. Scatter the "
            "data set that you evaluate as the last step, or scatter it with force_equal_length=False"
        )
    return data


def stream_of(data: Any) -> ScatteredStream | None:
    """Returns the rank's part of an iterable data set that a DataLoader or data set is; None for others."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    return dataset if isinstance(dataset, ScatteredStream) else None


def samples_in(data: Any) -> int | None:
    """Returns the number of samples of one pass over a DataLoader or data set; None if it is unknown."""
    if isinstance(data, DataLoader):
        sampler = data.sampler
        if isinstance(data.dataset, IterableDataset) or not isinstance(sampler, Sized):
            return None
        if data.batch_size is None and data.batch_sampler is None:
            return None  # its items may be samples, or batches of any size
        if type(data.batch_sampler) not in (BatchSampler, type(None)):
            return None
        samples = len(sampler)
        return samples - samples % data.batch_size if data.drop_last and data.batch_size else samples
    return len(data) if hasattr(data, "__len__") and not isinstance(data, IterableDataset) else None


def _same_loader_over(dataset: ScatteredDataset | ScatteredStream, loader: DataLoader) -> DataLoader:
    options: dict[str, Any] = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
    if isinstance(dataset, ScatteredStream):
        return DataLoader(dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **options)
    if not _has_default_order(loader.sampler) or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ArgumentError(
            f"the DataLoader has {loader.dataset} and a custom sampler, so that its repeated item cannot be left out. "
            "Scatter the data to evaluate with force_equal_length=False, or give the sampler "
            "torchmn.training.without_repeats(dataset)"
        )
    shuffle = isinstance(loader.sampler, RandomSampler) and len(dataset) > 0  # RandomSampler raises for no items
    return DataLoader(dataset, batch_size=loader.batch_size, shuffle=shuffle, drop_last=loader.drop_last, **options)


def _has_default_order(sampler: object) -> bool:
    """Returns whether a loader made `sampler` for shuffle=False or shuffle=True."""
    if type(sampler) is SequentialSampler:
        return True
    if not isinstance(sampler, RandomSampler) or type(sampler) is not RandomSampler:
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


_SAMPLER_REPEATS = (
    "torch's DistributedSampler repeats items to make lengths equal, which would be counted twice: use "
    "torchmn.scatter_dataset instead for the data to evaluate"
)


def _refuse_distributed_sampler(loader: DataLoader) -> None:
    if _has_repeating_sampler(loader):
        raise ArgumentError(_SAMPLER_REPEATS)


def _has_repeating_sampler(loader: object) -> bool:
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    if not isinstance(sampler, DistributedSampler):
        return False
    return isinstance(sampler.dataset, Sized) and sampler.total_size > len(sampler.dataset)


def sampler_problem(evaluator: Any, samples: Iterable[float | None]) -> str | None:
    """Returns an error message if a loader that `evaluator` refers to repeats items, or None.

    A loader counts as evaluated if a metric is the mean over as many samples as its sampler has.

    Args:
        evaluator: a function, or an object with a method `evaluate`.
        samples: the number of samples of each metric that it returned.

    Returns:
        The message, or None.
    """
    counted = {number for number in samples if number is not None}
    for value in chain.from_iterable(_flatten(value) for value in _reachable(evaluator)):
        if _has_repeating_sampler(value) and len(value.sampler) in counted:
            return _SAMPLER_REPEATS
    return None


def _reachable(evaluator: Any) -> Iterator[Any]:
    """Yields what an evaluator can use besides arguments: attributes, closure variables, globals and defaults."""
    function = evaluator if inspect.isroutine(evaluator) else None
    owner = getattr(evaluator, "__self__", evaluator)
    if function is None or owner is not evaluator:
        yield from getattr(owner, "__dict__", {}).values()
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        closure = inspect.getclosurevars(function)
        yield from (*closure.nonlocals.values(), *closure.globals.values(), *(function.__defaults__ or ()))


def _repeats_inside(dataset: Any) -> Iterator[ScatteredDataset | ScatteredStream]:
    """Yields the scattered data sets with repeated items in the attributes of `dataset`, at any depth."""
    seen, remaining = {id(dataset)}, [dataset]  # data sets may refer to each other
    while remaining:
        attributes = getattr(remaining.pop(), "__dict__", {}).values()  # lists and arrays are data sets, too
        for inner in chain.from_iterable(_flatten(value) for value in attributes):
            if isinstance(inner, ScatteredDataset | ScatteredStream) and inner.repeated:
                yield inner
            elif isinstance(inner, Dataset) and id(inner) not in seen:
                seen.add(id(inner))
                remaining.append(inner)


def _flatten(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)
