"""Ranks that compare their data sets before items are dealt out, without reading more than a few of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import digest_of
from torchmn.communicators.watchdog.waits import ranks_text
from torchmn.context import process
from torchmn.data.digest import PLAIN, digest
from torchmn.datasets.arrays import ImageSet
from torchmn.errors import MismatchError

COMPARED = 8
"""How many items of a data set are compared."""


def has_items(length: int | None, rank: int, root: int) -> bool:
    """Whether a rank has items of its own: None or an empty data set off the root stands for root's."""
    return rank == root or bool(length)


def compare_facts(comm: Communicator, operation: str, facts: Mapping[int, Sequence[str]], root: int) -> None:
    """Raises a MismatchError if `facts`, of each rank that has a data set, are not equal; all ranks pass the same."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, said in facts.items():
        groups.setdefault(tuple(said), []).append(rank)
    if len(groups) > 1:
        lines = "\n".join(f"  rank {ranks_text(ranks)}: {', '.join(said)}" for said, ranks in groups.items())
        raise MismatchError(
            f"rank {comm.rank} of {comm.size}: {operation}: ranks do not have the same data; nothing was sent:\n"
            f"{lines}\nPass the same on every rank, or None on all ranks but the root (rank {root})."
        )


def compare_items(
    comm: Communicator, operation: str, probes: Mapping[str, Any] | None, length: int, root: int, wanted: bool = True
) -> None:
    """Compares the items at a few places; every rank calls it.

    probes: this rank's data set, or several views of it by name, of which ranks compare those that both have; None
        on a rank that has none
    wanted: False where the user has said that items cannot be compared

    Raises:
        MismatchError: on every rank, naming the first item that is not the same on all of them.
    """
    if not wanted or comm.size == 1:
        return
    read = {} if probes is None else _read(probes, length)
    told = comm.agree(operation, differ=(tuple((name, its_digest) for name, (its_digest, _) in read.items()),))
    digests = [dict(pairs) for (pairs,) in told]
    for name in dict.fromkeys(name for has in digests for name in has):
        if len({has[name] for has in digests if name in has}) > 1:
            texts = comm.allgather_obj(read[name][1] if name in read else None)
            groups: dict[tuple[str, str], list[int]] = {}
            for rank, has in enumerate(digests):
                if name in has:
                    groups.setdefault((has[name], texts[rank]), []).append(rank)
            lines = "\n".join(f"  rank {ranks_text(ranks)}: {text}" for (_, text), ranks in groups.items())
            raise MismatchError(
                f"rank {comm.rank} of {comm.size}: {operation}: ranks have data sets of one length, {length}, but with "
                f"other items or in another order; nothing was sent. {name}:\n{lines}\nMake the order the same on "
                "every rank (sort what os.listdir or a set gives; shuffle with one seed, or by shuffle=True); or "
                f"pass None on all ranks but the root (rank {root}), whose items are then sent. Items that are the "
                "same and cannot look so (their numbers come from a generator of their own, their paths are a "
                "host's): compare_items=False."
            )


def places(length: int) -> list[int]:
    """Which items are compared: the first, the last and others in between, the same on every rank."""
    if length <= COMPARED:
        return list(range(length))
    between = random.Random(length).sample(range(1, length - 1), COMPARED - 2)
    return [0, *sorted(between), length - 1]


def _read(probes: Mapping[str, Any], length: int) -> dict[str, tuple[str, str]]:
    """Digest and description of what is compared, by name."""
    read = {}
    for kind, dataset in probes.items():
        if type(dataset) in (list, tuple) and all(isinstance(item, PLAIN) for item in dataset):
            read["All items"] = (digest(repr(list(dataset))), "other items")
        quiet = type(dataset) in (list, tuple, range, Tensor, np.ndarray, TensorDataset, ImageSet)
        source = dataset if quiet else _apart(dataset)
        for place in places(length):
            try:
                if quiet:
                    item = source[place]
                else:
                    with one_seed(place):
                        item = source[place]
                read[f"Item {place}{kind}"] = digest(item), describe(item)
            except Exception as error:  # a user's data set may raise anything; if it does so on all ranks, it is equal
                text = f"dataset[{place}] raised {type(error).__name__}"
                read[f"Item {place}{kind}"] = digest(text), f"{text}: {error}"
    # The names of single items first: they say more in a message.
    return dict(sorted(read.items(), key=lambda entry: entry[0] == "All items"))


@contextmanager
def one_seed(seed: int) -> Iterator[None]:
    """While it lasts, the global generators of torch, NumPy and Python start from `seed`; then they are as before."""
    on_gpu = torch.cuda.is_initialized()
    with process.lock, torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_gpu else []):
        python, numpy = random.getstate(), np.random.get_state()
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


def _apart(dataset: Any) -> Any:
    """A shallow copy of a data set, and of data sets and generators inside it, to be read instead of it.

    A file that is opened at the first read, as for h5py or LMDB, would otherwise be shared by the worker processes that
    a DataLoader forks later; and a generator of its own would give other numbers than without the comparison.
    """
    if not hasattr(dataset, "__dict__") or hasattr(type(dataset), "__del__"):  # which may close what is shared
        return dataset
    try:
        apart = copy(dataset)
        for name, value in vars(apart).items():
            if isinstance(value, Dataset):
                vars(apart)[name] = _apart(value)
            elif isinstance(value, list) and value and all(isinstance(inner, Dataset) for inner in value):
                vars(apart)[name] = [_apart(inner) for inner in value]
            elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
                vars(apart)[name] = deepcopy(value)
            elif isinstance(value, torch.Generator):
                vars(apart)[name] = torch.Generator(value.device)
                vars(apart)[name].set_state(value.get_state())
    except Exception:  # a class that cannot be copied
        return dataset
    return apart


def selection(dataset: Any) -> str | None:
    """A digest of the choice and order of `random_split`, `Subset`, or a part of a scattered set; None for no choice.

    Ranks that split at random with other seeds would deal out items of different splits: some twice, some to nobody.
    """
    if isinstance(dataset, ConcatDataset):
        chosen = [selection(inner) for inner in dataset.datasets]
        return digest_of((repr(chosen),)) if any(each is not None for each in chosen) else None
    indices = getattr(dataset, "indices", None)
    if indices is None or isinstance(dataset, type) or callable(indices):
        return None
    try:
        numbers = np.asarray(indices)
        if numbers.dtype.kind not in "iu" or numbers.shape != (len(dataset),):
            return None
    except Exception:  # an attribute of that name in somebody's own data set may be anything
        return None
    inner = selection(getattr(dataset, "dataset", getattr(dataset, "source", None)))
    return digest_of((numbers.astype(np.int64), inner or ""))
