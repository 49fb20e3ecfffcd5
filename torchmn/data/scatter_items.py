"""A data set's items on their way from the rank that has them to ranks that have not.

In rounds: each round carries a bounded number of bytes, so the sender never holds more than that of what is on
its way, however large the data set is. Every rank of the communicator takes part in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.wire import TensorSpec
from torchmn.communicators.objects import pack, unpack
from torchmn.datasets.arrays import ImageSet
from torchmn.errors import TorchMNError


@dataclass(frozen=True)
class Table:
    """How to take rows out of a data set."""

    kind: str  # names the entry of `_BUILDERS` that makes a data set of rows again
    name: str
    take: Callable[[Tensor], tuple[Tensor, ...]]


def table_of(dataset: Any) -> Table | None:
    """How to take rows of `dataset`, or None if its items may be more than rows.

    Only classes that we know: a class derived from them may compute its items in any way.
    """
    kind = type(dataset)
    if kind is Tensor and _is_rows(dataset):
        return Table("tensor", "", lambda rows: (_taken(dataset, rows),))
    if kind is np.ndarray and dataset.ndim > 0 and _torch_knows(dataset.dtype):
        return Table("array", "", lambda rows: (torch.from_numpy(dataset[rows.numpy()]),))
    if kind is TensorDataset and all(_is_rows(x) for x in dataset.tensors):
        return Table("TensorDataset", "", lambda rows: tuple(_taken(x, rows) for x in dataset.tensors))
    if kind is ImageSet and _is_rows(dataset.images) and _is_rows(dataset.labels):
        columns = (dataset.images, dataset.labels)
        return Table("ImageSet", dataset.name, lambda rows: tuple(_taken(x, rows) for x in columns))
    return None


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """These rows; x[rows] knows no float8 and no uint16 in some releases of torch, such as 2.6."""
    return x.index_select(0, rows.to(x.device))


def dataset_of_rows(kind: str, name: str, columns: Sequence[Tensor]) -> Any:
    """A data set of the same kind as the one that the rows were taken from."""
    return _BUILDERS[kind](name, columns)


_BUILDERS: dict[str, Callable[[str, Sequence[Tensor]], Any]] = {
    "tensor": lambda name, columns: columns[0],
    "array": lambda name, columns: columns[0].numpy(),
    "TensorDataset": lambda name, columns: TensorDataset(*columns),
    "ImageSet": lambda name, columns: ImageSet(name, *columns),
}


def _is_rows(x: object) -> bool:
    return isinstance(x, Tensor) and arguments.tensor_problem(x) is None and x.dim() > 0


def _torch_knows(dtype: np.dtype) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


ROUND_BYTES = 32 << 20
"""About as much travels in one round, to all ranks together."""

_GROWTH = 8  # rounds begin small and grow: only the first ones tell how large items are


class UndeliverableItem(TorchMNError):
    """An item that the data set can not give, or that does not pickle."""


def deliver(datasets: Sequence[Any], parts: Sequence[Tensor], comm: Communicator, root: int, operation: str) -> Any:
    """A data set, in memory, of the items that are this rank's.

    datasets: on root, for each rank the data set that its items come from: all of one kind, maybe one and the same;
        other ranks pass anything
    parts: for each rank the indices of its items, the same on all ranks
    operation: its name for messages
    """
    tables = [table_of(dataset) for dataset in datasets] if comm.rank == root else []
    known = [table for table in tables if table is not None]
    plans = None
    if known and len(known) == len(tables):
        empty = torch.empty(0, dtype=torch.int64)
        columns = [table.take(empty) for table in known]
        plans = [
            (table.kind, table.name, [TensorSpec(x.dtype, tuple(x.shape[1:]), x.is_cuda) for x in its_columns])
            for table, its_columns in zip(known, columns, strict=True)
        ]
    plans = comm.bcast_obj(plans, root)
    if plans is not None:
        return _deliver_rows(known, plans, parts, comm, root)
    return _deliver_items(datasets, parts, comm, root, operation)


def _deliver_rows(
    tables: Sequence[Table],
    plans: Sequence[tuple[str, str, list[TensorSpec]]],
    parts: Sequence[Tensor],
    comm: Communicator,
    root: int,
) -> Any:
    """Rows of tensors, as tensors of the same dtype: nothing is pickled."""
    kind, name, row = plans[comm.rank]
    row_bytes = sum(spec.nbytes for part, plan in zip(parts, plans, strict=True) if len(part) for spec in plan[2])
    step = max(1, ROUND_BYTES // max(1, row_bytes))
    mine = [
        torch.empty(
            (len(parts[comm.rank]), *spec.shape), dtype=spec.dtype, device=comm.device if spec.on_gpu else "cpu"
        )
        for spec in row
    ]
    for start in range(0, max(map(len, parts)), step):
        rows = [table.take(part[start : start + step]) for table, part in zip(tables, parts, strict=False)]
        for number, column in enumerate(mine):
            arrived = comm.scatter([columns[number] for columns in rows] if rows else None, root)
            column[start : start + len(arrived)] = arrived
    return dataset_of_rows(kind, name, mine)


def _deliver_items(
    datasets: Sequence[Any], parts: Sequence[Tensor], comm: Communicator, root: int, operation: str
) -> list[Any]:
    """Items of any kind, several in a parcel."""
    mine: list[Any] = []
    done, count = 0, 1
    while done < max(map(len, parts)):
        count = comm.bcast_obj(count, root)
        parcels = _parcels(datasets, [part[done : done + count] for part in parts], comm, root, operation)
        mine += unpack(comm.scatter(parcels, root), comm.device)
        done += count
        if parcels is not None:
            fitting = count * ROUND_BYTES // sum(map(len, parcels))
            count = max(1, min(fitting, count * _GROWTH))
    return mine


def _parcels(
    datasets: Sequence[Any], parts: Sequence[Tensor], comm: Communicator, root: int, operation: str
) -> list[Tensor] | None:
    """On root, a parcel of items for each rank; an item that can not be packed raises on all ranks."""
    parcels = None
    try:
        if comm.rank == root:
            parcels = [_parcel(dataset, part) for dataset, part in zip(datasets, parts, strict=True)]
    except UndeliverableItem as error:
        comm.agree(operation, str(error))
    else:
        comm.agree(operation)
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
