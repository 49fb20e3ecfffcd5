"""Each rank's share of a data set."""

from __future__ import annotations

from operator import index as as_int
from typing import Any

from torch.utils.data import IterableDataset

from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator
from torchmn.data import same_data
from torchmn.data.partition import Window, permutation
from torchmn.data.same_data import compare_facts, has_items, selection
from torchmn.data.scatter_items import deliver
from torchmn.data.scattered import ScatteredDataset
from torchmn.data.seeds import drawn_seed
from torchmn.errors import ArgumentError, MismatchError


def scatter_dataset(
    dataset: Any,
    comm: Communicator,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    force_equal_length: bool = True,
    *,
    compare_items: bool = True,
) -> ScatteredDataset:
    """Returns this rank's part of root's data set, itself a map-style data set; every rank calls it.

    A rank that passes None, or an empty data set, is sent its items, and only those; root then keeps a copy of its own
    ones, so that the whole can be freed. A rank that passes a data set reads its items from that, and only indices are
    dealt out: it must be the same data set, in the same order, as root's. Ranks compare its length and eight of its
    items, which are read with the global generators of torch, NumPy and Python seeded alike, and restored afterwards.
    A list or tuple of names or numbers is compared as a whole.

    Args:
        dataset: map-style: anything with `len` and `[]`. Tensors, arrays and `TensorDataset`s travel as they are;
            the items of others must pickle.
        comm: communicator whose ranks get the parts.
        root: the rank whose data set is dealt out.
        shuffle: deal the items out in the order of `seed`. Without a seed, each call draws a new one from root's
            random state, so that `torch.manual_seed` makes it repeatable; every rank draws, so that random states that
            were equal stay equal. The order does not depend on the number of ranks.
        seed: of the order, an int >= 0.
        force_equal_length: all parts get ceil(n / size) items, as data-parallel training wants, and at most one item
            of each part, its last, is another rank's too (`ScatteredDataset.repeated`). False: every item is on
            exactly one rank, and lengths differ by at most one.
        compare_items: False where ranks have the same data set although its items do not look so: their random
            numbers come from a generator of their own, or they name files of one host. Then lengths alone are compared.

    Raises:
        ArgumentError: on every rank, for a wrong argument, or an item that cannot travel.
        MismatchError: on every rank, if ranks pass other arguments, or data sets that are not the same.
    """
    if not isinstance(comm, Communicator):
        raise ArgumentError(f"scatter_dataset: expected comm to be a communicator, got {arguments.describe(comm)}")
    length, problem = None, arguments.rank_problem(root, comm.size, "root")
    if problem is None:
        length, problem = _length(dataset, needed=comm.rank == root)
    if problem is None:
        seed, problem = _integer(seed, "seed", least=0, below=2**64)
    agreed = {
        "root": root,
        "shuffle": bool(shuffle),
        "seed": seed,
        "force_equal_length": bool(force_equal_length),
        "compare_items": bool(compare_items),
    }
    chosen = None if problem else selection(dataset)
    told = comm.agree("scatter_dataset", problem, differ=(length, chosen), **agreed)
    total = told[root][0]
    owners = [rank for rank, (its_length, _) in enumerate(told) if has_items(its_length, rank, root)]
    compare_facts(comm, "scatter_dataset", {rank: (f"{told[rank][0]} items",) for rank in owners}, root)
    _check_selections(comm, {told[rank][1] for rank in owners})
    if len(owners) > 1:
        mine = {"": dataset} if comm.rank in owners else None
        same_data.compare_items(comm, "scatter_dataset", mine, total, root, wanted=compare_items)
    if shuffle and seed is None:
        seed = drawn_seed(comm, root)
    order = permutation(total, seed if shuffle else None)
    windows = [Window.of(total, comm.size, rank, force_equal_length) for rank in range(comm.size)]
    window = windows[comm.rank]
    indices = order[window.places()]
    if len(owners) == comm.size:
        return ScatteredDataset(dataset, indices, window.repeated, total, places=indices)
    receives = [rank == root or rank not in owners for rank in range(comm.size)]
    sent = [order[w.places()] if wanted else order[:0] for w, wanted in zip(windows, receives, strict=True)]
    part = deliver([dataset] * comm.size, sent, comm, root, "scatter_dataset")
    if receives[comm.rank]:
        return ScatteredDataset(part, indices, window.repeated, total)
    return ScatteredDataset(dataset, indices, window.repeated, total, places=indices)


def scatter_index(
    n: int | None, comm: Communicator, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """`(begin, end)`: this rank's share of `range(n)`, for ranks that load their own data; every rank calls it.

    Ranks other than `root` may pass None. With `force_equal_length` all shares have ceil(n / size) numbers, and
    the first of a share may be the last of the share before it, too: an evaluation that must count every item once
    wants False. Only numbers are dealt out: that number i is the same item on every rank is up to the caller.
    """
    problem = arguments.rank_problem(root, comm.size, "root")
    if problem is None:
        n, problem = _integer(n, "n", least=0)
    if problem is None and n is None and comm.rank == root:
        problem = "expected n to be an int, got None on the root"
    agreed = {"root": root, "force_equal_length": bool(force_equal_length)}
    told = comm.agree("scatter_index", problem, differ=(n,), **agreed)
    facts = {rank: (f"{number} n",) for rank, (number,) in enumerate(told) if number is not None}
    compare_facts(comm, "scatter_index", facts, root)
    total = told[root][0]
    window = Window.of(total, comm.size, comm.rank, force_equal_length)
    return window.begin, window.end


def _length(dataset: Any, needed: bool) -> tuple[int | None, str | None]:
    """Length of a map-style data set, and what is wrong with it; None for None."""
    if dataset is None:
        return None, "expected a data set on the root, got None" if needed else None
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset):
        return None, (
            f"expected a map-style data set, with len() and [], got {type(dataset).__name__}. An iterable one can be "
            "shared batch by batch: torchmn.iterators.create_multi_node_iterator"
        )
    try:
        return len(dataset), None
    except Exception as error:  # a user's __len__, or a torch.utils.data.Dataset without one
        return None, f"expected a data set with a length, got {type(dataset).__name__}: {error}"


def _check_selections(comm: Communicator, numbers: set[str | None]) -> None:
    """Raise if ranks have chosen other items, or another order; all of them know all ranks' `numbers`."""
    if len(numbers) > 1:
        raise MismatchError(
            f"rank {comm.rank} of {comm.size}: scatter_dataset: ranks have data sets of one length, but with other "
            "items or in another order (a Subset, or a part that was scattered before); nothing was sent. Give "
            "random_split the same generator on all ranks, generator=torch.Generator().manual_seed(0); scatter the "
            "whole, once; or pass None on all ranks but the root"
        )


def _integer(value: Any, name: str, least: int, below: int | None = None) -> tuple[int | None, str | None]:
    """`value` as a plain int, NumPy's too, and what is wrong with it; None for None."""
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
