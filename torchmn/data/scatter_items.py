"""`scatter_items` sends the items of a data set from one rank to the ranks that do not have it.

Items are sent in rounds of a bounded number of bytes, which limits the memory of the sender for data sets of any size.
All ranks of the communicator take part in every round.
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
from torchmn.context import collections_paused
from torchmn.datasets.arrays import ImageSet
from torchmn.errors import TorchMNError

ROUND_BYTES = 32 << 20
"""About how many bytes one round sends, to all ranks together."""

# Rounds start with one item and grow by at most this factor, because the size of items is unknown before.
_GROWTH = 8


class UnsendableItem(TorchMNError):
    """An item that cannot be read from the data set, or cannot be pickled."""


def scatter_items(
    datasets: Sequence[Any], parts: Sequence[Tensor], comm: Communicator, root: int, operation: str
) -> Any:
    """Returns a data set, in memory, of this rank's items; all ranks must call.

    Args:
        datasets: on root, the data set from which each rank's items are taken: all of one kind, or the same one;
            ignored on other ranks.
        parts: the indices of each rank's items; the same on all ranks.
        comm: communicator of the ranks.
        root: the rank that sends.
        operation: its name, in messages.

    Raises:
        ArgumentError: on every rank, for an item that cannot be read or pickled.
    """
    tables = [_table_of(dataset) for dataset in datasets] if comm.rank == root else []
    readable = [table for table in tables if table is not None]
    layouts = None
    if readable and len(readable) == len(tables):
        no_rows = torch.empty(0, dtype=torch.int64)
        layouts = [
            (table.kind, table.name, [TensorSpec(x.dtype, tuple(x.shape[1:]), x.is_cuda) for x in table.take(no_rows)])
            for table in readable
        ]
    layouts = comm.bcast_obj(layouts, root)
    if layouts is not None:
        return _scatter_rows(readable, layouts, parts, comm, root)
    return _scatter_pickled(datasets, parts, comm, root, operation)


@dataclass(frozen=True)
class _Table:
    """A data set of rows of tensors: its entry in `_BUILDERS`, its name, and a function that takes rows."""

    kind: str
    name: str
    take: Callable[[Tensor], tuple[Tensor, ...]]


_BUILDERS: dict[str, Callable[[str, Sequence[Tensor]], Any]] = {
    "tensor": lambda name, columns: columns[0],
    "array": lambda name, columns: columns[0].numpy(),
    "TensorDataset": lambda name, columns: TensorDataset(*columns),
    "ImageSet": lambda name, columns: ImageSet(name, *columns),
}


def _table_of(dataset: Any) -> _Table | None:
    """Returns `dataset` as a table, or None: a class derived from these may compute its items in any way."""
    kind = type(dataset)
    if kind is Tensor and _has_rows(dataset):
        return _Table("tensor", "", lambda rows: (_take(dataset, rows),))
    if kind is np.ndarray and dataset.ndim > 0 and _is_torch_dtype(dataset.dtype):
        return _Table("array", "", lambda rows: (torch.from_numpy(dataset[rows.numpy()]),))
    if kind is TensorDataset and all(_has_rows(x) for x in dataset.tensors):
        return _Table("TensorDataset", "", lambda rows: tuple(_take(x, rows) for x in dataset.tensors))
    if kind is ImageSet and _has_rows(dataset.images) and _has_rows(dataset.labels):
        columns = (dataset.images, dataset.labels)
        return _Table("ImageSet", dataset.name, lambda rows: tuple(_take(x, rows) for x in columns))
    return None


def _take(x: Tensor, rows: Tensor) -> Tensor:
    # x[rows] does not support float8 and uint16 in some releases of torch, such as 2.6.
    return x.index_select(0, rows.to(x.device))


def _has_rows(x: object) -> bool:
    return isinstance(x, Tensor) and arguments.tensor_problem(x) is None and x.dim() > 0


def _is_torch_dtype(dtype: np.dtype) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


def _scatter_rows(
    tables: Sequence[_Table],
    layouts: Sequence[tuple[str, str, list[TensorSpec]]],
    parts: Sequence[Tensor],
    comm: Communicator,
    root: int,
) -> Any:
    """Sends rows of tensors as tensors of the same dtype, without pickling."""
    kind, name, row = layouts[comm.rank]
    row_bytes = sum(spec.nbytes for part, layout in zip(parts, layouts, strict=True) if len(part) for spec in layout[2])
    step = max(1, ROUND_BYTES // max(1, row_bytes))
    columns = [
        torch.empty(
            (len(parts[comm.rank]), *spec.shape), dtype=spec.dtype, device=comm.device if spec.on_gpu else "cpu"
        )
        for spec in row
    ]
    for start in range(0, max(map(len, parts)), step):
        sent = [table.take(part[start : start + step]) for table, part in zip(tables, parts, strict=False)]
        for number, column in enumerate(columns):
            received = comm.scatter([rows[number] for rows in sent] if sent else None, root)
            column[start : start + len(received)] = received
    return _BUILDERS[kind](name, columns)


def _scatter_pickled(
    datasets: Sequence[Any], parts: Sequence[Tensor], comm: Communicator, root: int, operation: str
) -> list[Any]:
    """Sends items of any kind, several in one message."""
    items: list[Any] = []
    done, count = 0, 1
    while done < max(map(len, parts)):
        count = comm.bcast_obj(count, root)
        messages = _messages(datasets, [part[done : done + count] for part in parts], comm, root, operation)
        received = comm.scatter(messages, root)
        with collections_paused():
            items += unpack(received, comm.device)
        done += count
        if messages is not None:
            fitting = count * ROUND_BYTES // sum(map(len, messages))
            count = max(1, min(fitting, count * _GROWTH))
    return items


def _messages(
    datasets: Sequence[Any], parts: Sequence[Tensor], comm: Communicator, root: int, operation: str
) -> list[Tensor] | None:
    """Returns, on root, the packed items of each rank; raises on all ranks if an item cannot be packed."""
    messages = None
    try:
        if comm.rank == root:
            messages = [_packed(dataset, part) for dataset, part in zip(datasets, parts, strict=True)]
    except UnsendableItem as error:
        comm.agree(operation, str(error))
    else:
        comm.agree(operation)
    return messages


def _packed(dataset: Any, indices: Tensor) -> Tensor:
    items = {index: _item(dataset, index) for index in indices.tolist()}
    try:
        with collections_paused():
            return pack(list(items.values()))[0]
    except Exception as error:  # pickling may run user code that raises anything
        index, reason = next(filter(None, map(_pickle_failure, items.items())), (min(items), error))
        raise UnsendableItem(
            f"expected items that pickle, got item {index}, of type {type(items[index]).__name__}: {reason}. If every "
            "rank can open the data set, pass it on every rank: then no items are sent"
        ) from error


def _item(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        raise UnsendableItem(
            f"expected {len(dataset)} items, but dataset[{index}] raised {type(error).__name__}: {error}"
        ) from error


def _pickle_failure(entry: tuple[int, Any]) -> tuple[int, Exception] | None:
    """Returns the index of an item and the error of pickling it, or None."""
    index, item = entry
    try:
        pack(item)
    except Exception as error:
        return index, error
    return None
