"""`scatter_dataset` and `scatter_index`: each rank's part of a data set, or of a range of indices."""

from __future__ import annotations

from operator import index as as_int
from typing import Any, overload

from torch import Tensor
from torch.utils.data import IterableDataset

from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.data import same_data
from torchmn.data.partition import IndexRange, draw_seed, permutation
from torchmn.data.same_data import compare_facts, has_items, selection
from torchmn.data.scatter_items import scatter_items
from torchmn.data.scattered import ScatteredDataset
from torchmn.data.stream import ScatteredStream, compare_streams
from torchmn.errors import MismatchError
from torchmn.other_spellings import other_spellings

_DATASET = "scatter_dataset"
_STREAM = "stream"
"""Takes the place of the length of an iterable data set."""


@overload
def scatter_dataset(
    dataset: IterableDataset[Any],
    comm: Communicator,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    force_equal_length: bool = True,
    *,
    compare_items: bool = True,
) -> ScatteredStream: ...


@overload
def scatter_dataset(
    dataset: Any,
    comm: Communicator,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    force_equal_length: bool = True,
    *,
    compare_items: bool = True,
) -> ScatteredDataset: ...


@other_spellings
def scatter_dataset(
    dataset: Any,
    comm: Communicator,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    force_equal_length: bool = True,
    *,
    compare_items: bool = True,
) -> ScatteredDataset | ScatteredStream:
    """Returns this rank's part of root's data set; all ranks must call.

    A rank that passes a data set reads its items from it: the data set must be the same, in the same order, as root's.
    A rank that passes None or an empty data set receives its items, and no others, from root, which then keeps a copy
    of its part, so that the whole data set can be freed.

    An iterable data set (`IterableDataset`) must be passed by every rank, with the same items in the same order. Each
    rank iterates over all of them, and gets every n-th of n ranks: a `ScatteredStream`.

    Args:
        dataset: map-style, with `len` and `[]`, or an `IterableDataset`. Tensors, arrays and `TensorDataset`s are sent
            as they are; items of other data sets must pickle.
        comm: communicator whose ranks get the parts.
        root: the rank whose data set is distributed.
        shuffle: take the items in the random order of `seed`, which does not depend on the number of ranks.
        seed: an int >= 0; None draws one from root's random state. Every rank draws, so equal states stay equal.
        force_equal_length: all parts get ceil(n / size) items, as data-parallel training needs; the last item of a part
            may belong to another rank as well (`ScatteredDataset.repeated`). False: every item is on exactly one rank,
            and lengths differ by at most one.
        compare_items: compare eight items between ranks, read with equally seeded global generators, and lists of
            names or numbers completely. False compares lengths only, for data sets that are the same although their
            items look different: random numbers from a private generator, paths that differ between hosts.

    Returns:
        A data set of the items of this rank.

    Raises:
        ArgumentError: on every rank, for a wrong argument, or an item that cannot be sent.
        MismatchError: on every rank, if arguments or data sets differ between ranks.
    """
    comm = as_communicator(comm, _DATASET)
    seed, problem = _integer(seed, "seed", least=0, below=2**64)
    same = {"shuffle": bool(shuffle), "seed": seed, "force_equal_length": bool(force_equal_length)}
    problem = problem or _order_problem(dataset, shuffle)
    total, owners = _agree(dataset, comm, problem, root, bool(compare_items), same)
    if isinstance(dataset, IterableDataset):
        return ScatteredStream(dataset, comm.rank, comm.size, repeated=int(force_equal_length))
    if shuffle and seed is None:
        seed = draw_seed(comm, root)
    return _distribute(dataset, comm, root, permutation(total, seed if shuffle else None), owners, force_equal_length)


def _order_problem(dataset: Any, shuffle: bool) -> str | None:
    if not isinstance(dataset, IterableDataset) or not shuffle:
        return None
    return (
        f"expected shuffle=False for {type(dataset).__name__}, an iterable data set: its items come in its order. "
        "Let it shuffle them, with the same seed on all ranks"
    )


def _agree(
    dataset: Any, comm: Communicator, problem: str | None, root: int, compare_items: bool, same: dict[str, Any]
) -> tuple[int, list[int]]:
    """Compares arguments and data sets between ranks; returns the length and the ranks that have the data set."""
    length: int | str | None = None
    problem = arguments.rank_problem(root, comm.size, "root") or problem
    if problem is None:
        length, problem = _length(dataset, needed=comm.rank == root)
    selected = None if problem or length == _STREAM else selection(dataset)
    same = {"root": root, **same, "compare_items": compare_items}
    ranks = comm.agree(_DATASET, problem, differ=(length, selected), **same)
    lengths = [its_length for its_length, _ in ranks]
    if _STREAM in lengths:
        _check_all_streams(comm, lengths)
        compare_streams(comm, _DATASET, dataset, wanted=compare_items)
        return 0, []
    owners = [rank for rank, its_length in enumerate(lengths) if has_items(its_length, rank, root)]
    compare_facts(comm, _DATASET, {rank: (f"{ranks[rank][0]} items",) for rank in owners}, root)
    if len({ranks[rank][1] for rank in owners}) > 1:
        raise MismatchError(
            f"rank {comm.rank} of {comm.size}: {_DATASET}: ranks have data sets of the same length, but with other "
            "items or in another order (a Subset, or a part that was scattered before); nothing was sent. Give "
            "random_split the same generator on all ranks, generator=torch.Generator().manual_seed(0); scatter the "
            "whole data set, once; or pass None on all ranks but the root"
        )
    total: int = ranks[root][0]
    if len(owners) > 1:
        probes = {"": dataset} if comm.rank in owners else None
        same_data.compare_items(comm, _DATASET, probes, total, root, wanted=compare_items)
    return total, owners


def _check_all_streams(comm: Communicator, lengths: list[int | str | None]) -> None:
    """Raises a MismatchError on every rank unless all ranks passed an iterable data set."""
    others = [rank for rank, length in enumerate(lengths) if length != _STREAM]
    if others:
        raise MismatchError(
            f"rank {comm.rank} of {comm.size}: {_DATASET}: some ranks passed an iterable data set, but rank "
            f"{ranks_text(others)} did not. Pass the same one on every rank; or let one rank read it and send batch by "
            "batch: torchmn.iterators.create_multi_node_iterator"
        )


def _distribute(
    dataset: Any, comm: Communicator, root: int, order: Tensor, owners: list[int], equal: bool
) -> ScatteredDataset:
    """Returns this rank's part of `order`, after root has sent their items to the ranks that are not in `owners`."""
    total = len(order)
    ranges = [IndexRange.of(total, comm.size, rank, equal) for rank in range(comm.size)]
    indices, repeated = order[ranges[comm.rank].indices()], ranges[comm.rank].repeated
    receives = [rank == root or rank not in owners for rank in range(comm.size)]
    if len(owners) < comm.size:
        sent = [order[each.indices()] if taken else order[:0] for each, taken in zip(ranges, receives, strict=True)]
        part = scatter_items([dataset] * comm.size, sent, comm, root, _DATASET)
        if receives[comm.rank]:
            return ScatteredDataset(part, indices, repeated, total)
    return ScatteredDataset(dataset, indices, repeated, total, source_indices=indices)


@other_spellings
def scatter_index(
    n: int | None, comm: Communicator, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Returns this rank's part of `range(n)` as `(begin, end)`, for ranks that load their data themselves; collective.

    Ranks compare `n` only: item i must be the same on every rank.

    Args:
        n: number of items; ranks other than `root` may pass None.
        comm: communicator whose ranks get the parts.
        root: the rank whose `n` counts.
        force_equal_length: all parts have ceil(n / size) items; the first of a part may also be the last of the
            previous one. False: parts are disjoint, as an exact evaluation needs.

    Returns:
        The first index, and the one behind the last.

    Raises:
        ArgumentError: on every rank, for a wrong argument.
        MismatchError: on every rank, if arguments differ between ranks.
    """
    comm = as_communicator(comm, "scatter_index")
    problem = arguments.rank_problem(root, comm.size, "root")
    if problem is None:
        n, problem = _integer(n, "n", least=0)
    if problem is None and n is None and comm.rank == root:
        problem = "expected n to be an int, got None on the root"
    same = {"root": root, "force_equal_length": bool(force_equal_length)}
    ranks = comm.agree("scatter_index", problem, differ=(n,), **same)
    facts = {rank: (f"{number} n",) for rank, (number,) in enumerate(ranks) if number is not None}
    compare_facts(comm, "scatter_index", facts, root)
    part = IndexRange.of(ranks[root][0], comm.size, comm.rank, force_equal_length)
    return part.begin, part.end


def _length(dataset: Any, needed: bool) -> tuple[int | str | None, str | None]:
    """Returns the length of a map-style data set (None for None, _STREAM for a stream), and the problem with it."""
    if dataset is None:
        return None, "expected a data set on the root, got None" if needed else None
    if isinstance(dataset, IterableDataset):
        return _STREAM, None
    if not hasattr(dataset, "__getitem__"):
        return None, (
            f"expected a data set with len() and [], or an IterableDataset, got {type(dataset).__name__}. Other "
            "iterables are sent batch by batch: torchmn.iterators.create_multi_node_iterator"
        )
    try:
        return len(dataset), None
    except Exception as error:  # a user's __len__, or a torch.utils.data.Dataset without one
        return None, f"expected a data set with a length, got {type(dataset).__name__}: {error}"


def _integer(value: Any, name: str, least: int, below: int | None = None) -> tuple[int | None, str | None]:
    """Returns `value` as an int (None for None; NumPy integers too), and the problem with it."""
    if value is None:
        return None, None
    try:
        number = as_int(value)
    except TypeError:
        return None, f"expected {name} to be an int or None, got {arguments.describe(value)}"
    if number < least:
        return None, f"expected {name} >= {least}, got {number}"
    if below is not None and number >= below:
        return None, f"expected {name} < {below}, got {number}"
    return number, None
