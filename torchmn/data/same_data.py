"""Checks that ranks have the same data set before it is distributed, by its length, selection and a few items."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import digest_of
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.context import process
from torchmn.data.digest import PLAIN, digest
from torchmn.datasets.arrays import ImageSet
from torchmn.errors import MismatchError

COMPARED = 8
"""How many items of a data set are compared between ranks."""


def has_items(length: int | None, rank: int, root: int) -> bool:
    """Returns whether a rank passed a data set; None or an empty one, except on root, means to receive root's items."""
    return rank == root or bool(length)


def compare_facts(comm: Communicator, operation: str, facts: Mapping[int, Sequence[str]], root: int) -> None:
    """Raises a MismatchError unless the facts of all ranks in `facts` are equal; all ranks pass the same `facts`."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, values in facts.items():
        groups.setdefault(tuple(values), []).append(rank)
    if len(groups) > 1:
        lines = "\n".join(f"  rank {ranks_text(ranks)}: {', '.join(values)}" for values, ranks in groups.items())
        raise MismatchError(
            f"rank {comm.rank} of {comm.size}: {operation}: ranks do not have the same data; nothing was sent:\n"
            f"{lines}\nPass the same on every rank, or None on all ranks but the root (rank {root})."
        )


def compare_items(
    comm: Communicator, operation: str, probes: Mapping[str, Any] | None, length: int, root: int, wanted: bool = True
) -> None:
    """Compares a few items of the ranks' data sets; all ranks must call.

    Args:
        comm: communicator whose ranks have the data sets.
        operation: its name, in messages.
        probes: this rank's data set, or several views of it by name suffix, of which ranks compare those that both
            have; None on a rank without a data set.
        length: number of items, the same on all ranks.
        root: the rank whose items other ranks can receive instead, for the message.
        wanted: False if the user has disabled the comparison; the same on all ranks.

    Raises:
        MismatchError: on every rank, naming the first item that differs between ranks.
    """
    if not wanted or comm.size == 1:
        return
    read = {} if probes is None else _read(probes, length)
    ranks = comm.agree(operation, differ=(tuple((name, its_digest) for name, (its_digest, _) in read.items()),))
    digests = [dict(pairs) for (pairs,) in ranks]
    for name in dict.fromkeys(name for by_name in digests for name in by_name):
        if len({by_name[name] for by_name in digests if name in by_name}) > 1:
            texts = comm.allgather_obj(read[name][1] if name in read else None)
            groups: dict[tuple[str, str], list[int]] = {}
            for rank, by_name in enumerate(digests):
                if name in by_name:
                    groups.setdefault((by_name[name], texts[rank]), []).append(rank)
            lines = "\n".join(f"  rank {ranks_text(ranks)}: {text}" for (_, text), ranks in groups.items())
            raise MismatchError(
                f"rank {comm.rank} of {comm.size}: {operation}: ranks have data sets of the same length, {length}, but "
                f"with other items or in another order; nothing was sent. {name}:\n{lines}\nUse the same order on "
                "every rank (sort the names from os.listdir or from a set; shuffle with the same seed, or with "
                f"shuffle=True); or pass None on all ranks but the root (rank {root}), which then sends the items. If "
                "the items are the same although they look different (random numbers from a private generator, paths "
                "that differ between hosts): compare_items=False."
            )


def compared_indices(length: int) -> list[int]:
    """Returns which items are compared: the first, the last and some in between, the same on every rank."""
    if length <= COMPARED:
        return list(range(length))
    between = random.Random(length).sample(range(1, length - 1), COMPARED - 2)
    return [0, *sorted(between), length - 1]


def _read(probes: Mapping[str, Any], length: int) -> dict[str, tuple[str, str]]:
    """Returns digest and description of each compared item, by its name in messages."""
    read = {}
    for kind, dataset in probes.items():
        if type(dataset) in (list, tuple) and all(isinstance(item, PLAIN) for item in dataset):
            read["All items"] = (digest(repr(list(dataset))), "other items")
        # Reading an item of these runs no user code.
        has_side_effects = type(dataset) not in (list, tuple, range, Tensor, np.ndarray, TensorDataset, ImageSet)
        source = copy_for_reading(dataset) if has_side_effects else dataset
        for index in compared_indices(length):
            try:
                with seeded_generators(index) if has_side_effects else nullcontext():
                    item = source[index]
                read[f"Item {index}{kind}"] = digest(item), describe(item)
            except Exception as error:  # a user's data set may raise anything; on all ranks, that is no difference
                text = f"dataset[{index}] raised {type(error).__name__}"
                read[f"Item {index}{kind}"] = digest(text), f"{text}: {error}"
    # Single items first: they make the better message.
    return dict(sorted(read.items(), key=lambda entry: entry[0] == "All items"))


@contextmanager
def seeded_generators(seed: int | None) -> Iterator[None]:
    """Context in which the global generators of torch, NumPy and Python start from `seed`; restores their states.

    None: they start from their current states.
    """
    on_gpu = torch.cuda.is_initialized()
    with process.lock, torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_gpu else []):
        python, numpy = random.getstate(), np.random.get_state()
        if seed is not None:
            torch.random.default_generator.manual_seed(seed)
            if on_gpu:
                torch.cuda.manual_seed_all(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def copy_for_reading(dataset: Any) -> Any:
    """Returns a shallow copy of a data set, and of data sets and generators in its attributes.

    Reading the original would open files that h5py or LMDB data sets open at the first read, and that the workers of a
    DataLoader, forked later, would then share; and it would advance the generators of the data set.
    """
    if not hasattr(dataset, "__dict__") or hasattr(type(dataset), "__del__"):  # __del__ may close a shared file
        return dataset
    try:
        duplicate = copy(dataset)
        attributes = vars(duplicate)
        for name, value in attributes.items():
            if isinstance(value, Dataset):
                attributes[name] = copy_for_reading(value)
            elif isinstance(value, list) and value and all(isinstance(inner, Dataset) for inner in value):
                attributes[name] = [copy_for_reading(inner) for inner in value]
            elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
                attributes[name] = deepcopy(value)
            elif isinstance(value, torch.Generator):
                attributes[name] = torch.Generator(value.device)
                attributes[name].set_state(value.get_state())
    except Exception:  # a class that cannot be copied
        return dataset
    return duplicate


def selection(dataset: Any) -> str | None:
    """Returns a digest of the indices of a `Subset`, `random_split` or scattered data set; None for other data sets.

    If ranks split at random with different seeds, distributing their splits would repeat some items and lose others.
    """
    if isinstance(dataset, ConcatDataset):
        selections = [selection(inner) for inner in dataset.datasets]
        return digest_of((repr(selections),)) if any(each is not None for each in selections) else None
    indices = getattr(dataset, "indices", None)
    if indices is None or isinstance(dataset, type) or callable(indices):
        return None
    try:
        numbers = np.asarray(indices)
        if numbers.dtype.kind not in "iu" or numbers.shape != (len(dataset),):
            return None
    except Exception:  # `indices` of a user's class may be anything
        return None
    inner = selection(getattr(dataset, "dataset", getattr(dataset, "source", None)))
    return digest_of((numbers.astype(np.int64), inner or ""))
