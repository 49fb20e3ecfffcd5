"""A data set's items on their way from the rank that has them to ranks that have not.

In rounds: each round carries a bounded number of bytes, so the sender never holds more than that of what is on
its way, however large the data set is. Every rank of the communicator takes part in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.communicators.wire import TensorSpec
from torchmn.data.meeting import meet
from torchmn.data.parcel import pack, unpack
from torchmn.data.rows import Table, dataset_of_rows, table_of
from torchmn.errors import TorchMNError

ROUND_BYTES = 32 << 20
"""About as much travels in one round, to all ranks together."""

_GROWTH = 8  # rounds begin small and grow: only the first ones tell how large items are


class UndeliverableItem(TorchMNError):
    """An item that the data set can not give, or that does not pickle."""


def deliver(dataset: Any, parts: Sequence[Tensor], comm: Communicator, root: int) -> Any:
    """A data set, in memory, of the items of root's `dataset` that are this rank's; other ranks pass anything.

    parts: for each rank the indices of its items, the same on all ranks
    """
    table = table_of(dataset) if comm.rank == root else None
    if comm.bcast_obj(table is not None, root):
        return _deliver_rows(table, parts, comm, root)
    return _deliver_items(dataset, parts, comm, root)


def _deliver_rows(table: Table | None, parts: Sequence[Tensor], comm: Communicator, root: int) -> Any:
    """Rows of tensors, as tensors of the same dtype: nothing is pickled."""
    plan = None
    if table is not None:
        columns = table.take(parts[root][:0])
        plan = table.kind, table.name, [TensorSpec(x.dtype, tuple(x.shape[1:]), x.is_cuda) for x in columns]
    kind, name, row = comm.bcast_obj(plan, root)
    receivers = sum(len(part) > 0 for part in parts)
    step = max(1, ROUND_BYTES // max(1, receivers * sum(spec.nbytes for spec in row)))
    mine = [
        torch.empty(
            (len(parts[comm.rank]), *spec.shape), dtype=spec.dtype, device=comm.device if spec.on_gpu else "cpu"
        )
        for spec in row
    ]
    for start in range(0, max(map(len, parts)), step):
        rows = [table.take(part[start : start + step]) for part in parts] if table is not None else []
        for number, column in enumerate(mine):
            arrived = comm.scatter([columns[number] for columns in rows] if rows else None, root)
            column[start : start + len(arrived)] = arrived
    return dataset_of_rows(kind, name, mine)


def _deliver_items(dataset: Any, parts: Sequence[Tensor], comm: Communicator, root: int) -> list[Any]:
    """Items of any kind, several in a parcel."""
    mine: list[Any] = []
    done, count = 0, 1
    while done < max(map(len, parts)):
        count = comm.bcast_obj(count, root)
        parcels = _parcels(dataset, [part[done : done + count] for part in parts], comm, root)
        mine += unpack(comm.scatter(parcels, root), comm.device)
        done += count
        if parcels is not None:
            fitting = count * ROUND_BYTES // sum(map(len, parcels))
            count = max(1, min(fitting, count * _GROWTH))
    return mine


def _parcels(dataset: Any, parts: Sequence[Tensor], comm: Communicator, root: int) -> list[Tensor] | None:
    """On root, a parcel of items for each rank; an item that can not be packed raises on all ranks."""
    parcels = None
    try:
        if comm.rank == root:
            parcels = [_parcel(dataset, part) for part in parts]
    except UndeliverableItem as error:
        meet(comm, "scatter_dataset", str(error))
    else:
        meet(comm, "scatter_dataset")
    return parcels


def _parcel(dataset: Any, indices: Tensor) -> Tensor:
    items = {index: _item(dataset, index) for index in indices.tolist()}
    try:
        return pack(list(items.values()))[0]
    except Exception as error:  # pickling runs the items' own code, which may raise anything
        index, reason = next(filter(None, map(_why_not, items.items())), (min(items), error))
        raise UndeliverableItem(
            f"expected items that pickle, got item {index}, of type {type(items[index]).__name__}: {reason}. Where "
            "every rank can open the data set, pass it on every rank: then no item has to travel"
        ) from error


def _item(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        raise UndeliverableItem(
            f"expected {len(dataset)} items, but dataset[{index}] raised {type(error).__name__}: {error}"
        ) from error


def _why_not(entry: tuple[int, Any]) -> tuple[int, Exception] | None:
    """The index of an item and why it does not pickle; None if it does."""
    index, item = entry
    try:
        pack(item)
    except Exception as error:
        return index, error
    return None
