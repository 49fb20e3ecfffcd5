"""Data for an exact evaluation: every item of the whole data set once, and how many of them are here."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from torchmn.data import ScatteredDataset
from torchmn.errors import ArgumentError

# What a new loader takes over from an old one, beside batches and order.
_LOADER_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip


def is_data(argument: object) -> bool:
    """Whether `argument` is something whose samples can be counted: a DataLoader or a data set."""
    return isinstance(argument, DataLoader | Dataset)


def without_repeats(data: Any) -> Any:
    """A DataLoader or data set like `data`, without the items that `scatter_dataset` repeated to make lengths equal.

    Over all ranks it then has every item of the whole data set exactly once. What has no repeats is returned as it
    is. Raises an `ArgumentError` where repeats can not be left out: behind a sampler of the user's own, or inside
    another data set (a transform around a scattered one).
    """
    if isinstance(data, ScatteredDataset):
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


def samples_in(data: Any) -> int | None:
    """How many samples one pass over a DataLoader or data set goes through; None if nobody can know before."""
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset) or not hasattr(data.sampler, "__len__"):
            return None
        if data.batch_size is None and data.batch_sampler is None:
            return None  # its items may be samples, or batches of any size
        if type(data.batch_sampler) not in (BatchSampler, type(None)):
            return None
        samples = len(data.sampler)  # type: ignore[arg-type]
        return samples - samples % data.batch_size if data.drop_last and data.batch_size else samples
    return len(data) if hasattr(data, "__len__") else None


def _same_loader_over(dataset: ScatteredDataset, loader: DataLoader) -> DataLoader:
    sampler = loader.sampler
    shuffle = type(sampler) is RandomSampler
    known = type(sampler) is SequentialSampler or (
        shuffle and not sampler.replacement and sampler.num_samples == len(sampler.data_source)  # type: ignore[union-attr, arg-type]
    )
    if not known or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ArgumentError(
            f"the DataLoader has {loader.dataset} and a sampler of its own, so that its repeated item can not be left "
            "out. Scatter what you evaluate with force_equal_length=False, or give the sampler "
            "torchmn.training.without_repeats(dataset)"
        )
    options: dict[str, Any] = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
    if len(dataset) == 0:
        shuffle = False  # torch's RandomSampler refuses to shuffle nothing
    return DataLoader(dataset, batch_size=loader.batch_size, shuffle=shuffle, drop_last=loader.drop_last, **options)


_SAMPLER_REPEATS = (
    "torch's DistributedSampler repeats items to make lengths equal, which would be counted twice: use "
    "torchmn.scatter_dataset instead of it, for what you evaluate"
)


def _refuse_distributed_sampler(loader: DataLoader) -> None:
    if _has_repeating_sampler(loader):
        raise ArgumentError(_SAMPLER_REPEATS)


def _has_repeating_sampler(loader: object) -> bool:
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    return isinstance(sampler, DistributedSampler) and sampler.total_size > len(sampler.dataset)  # type: ignore[arg-type]


def sampler_problem(evaluator: Any, samples: Iterable[float | None]) -> str | None:
    """Why an evaluator's own loader repeats items, or None.

    It is the loader that it goes through if a metric is said to be the mean over as many samples as its sampler gives.
    """
    counted = {number for number in samples if number is not None}
    for held in chain.from_iterable(_parts(value) for value in _held_by(evaluator)):
        if _has_repeating_sampler(held) and len(held.sampler) in counted:
            return _SAMPLER_REPEATS
    return None


def _held_by(evaluator: Any) -> Iterator[Any]:
    """What an evaluator can reach without arguments: attributes, variables around a function, and global ones."""
    function = evaluator if inspect.isroutine(evaluator) else None
    owner = getattr(evaluator, "__self__", evaluator)
    if function is None or owner is not evaluator:
        yield from getattr(owner, "__dict__", {}).values()
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        around = inspect.getclosurevars(function)
        yield from (*around.nonlocals.values(), *around.globals.values(), *(function.__defaults__ or ()))


def _repeats_inside(dataset: Any) -> Iterator[ScatteredDataset]:
    """Scattered data sets with repeats that `dataset` is made of."""
    seen, waiting = {id(dataset)}, [dataset]  # two data sets may hold each other
    while waiting:
        held = vars(waiting.pop()).values()
        for part in chain.from_iterable(_parts(value) for value in held):
            if isinstance(part, ScatteredDataset) and part.repeated:
                yield part
            elif isinstance(part, Dataset) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)
