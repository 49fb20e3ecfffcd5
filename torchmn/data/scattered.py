"""`ScatteredDataset`, one rank's part of a data set, and the record of whether its repeated items were read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class ScatteredDataset(Dataset[Any]):
    """One rank's part of a data set, itself a map-style data set; made by `scatter_dataset`.

    Args:
        source: where items are read from.
        indices: see the attribute.
        repeated: see the attribute.
        global_length: see the attribute.
        source_indices: positions of the items in `source`; by default 0, 1, 2, ...

    Attributes:
        source: where items are read from: the whole data set, or the items that this rank received.
        indices: (len(self),) int64, the index of each item in the whole data set.
        repeated: how many items, the last ones, another rank has as well: an exact evaluation leaves them out.
        global_length: number of items in the whole data set.
    """

    def __init__(
        self, source: Any, indices: Tensor, repeated: int, global_length: int, source_indices: Tensor | None = None
    ) -> None:
        self.source = source
        self.indices = indices
        self.repeated = repeated
        self.global_length = global_length
        self._source_indices = torch.arange(len(indices)) if source_indices is None else source_indices

    @property
    def unique_length(self) -> int:
        """Number of items without the repeated ones; summed over ranks, the length of the whole data set."""
        return len(self.indices) - self.repeated

    def unique(self) -> ScatteredDataset:
        """Returns this part without its repeated items: on all ranks together, every item exactly once."""
        length, part = self.unique_length, copy(self)
        part.indices, part.repeated = self.indices[:length], 0
        part._source_indices = self._source_indices[:length]
        return part

    def __len__(self) -> int:
        if self.repeated and (uses := _uses.get()) is not None:
            uses.length_read.append(self)
        return len(self.indices)

    def __getitem__(self, index: int | slice) -> Any:
        """Returns one item, or for a slice a list of items."""
        if isinstance(index, slice):
            return list(self.__getitems__(range(*index.indices(len(self.indices)))))
        source_index = int(self._source_indices[index])
        if self.repeated:
            self._record_use([int(index)])
        return self.source[source_index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Returns the items of one batch; called by `DataLoader`."""
        source_indices = self._source_indices[torch.as_tensor(indices, dtype=torch.int64)].tolist()
        if self.repeated:
            self._record_use(indices)
        get_items = getattr(self.source, "__getitems__", None)
        return get_items(source_indices) if get_items else [self.source[index] for index in source_indices]

    def _record_use(self, indices: Sequence[int]) -> None:
        uses = _uses.get()
        if uses is not None:
            uses.read.append(self)
            if any(int(index) % len(self.indices) >= self.unique_length for index in indices):
                uses.repeated.append(self)

    def _contents(self) -> str:
        repeats = f", {self.repeated} repeated" if self.repeated else ""
        return f"{len(self.indices)} of {self.global_length} items{repeats}"

    def __repr__(self) -> str:
        return f"ScatteredDataset({self._contents()}; {type(self.source).__name__})"


class DatasetUses:
    """The data sets with repeated items whose length, items, or repeated items were read."""

    def __init__(self) -> None:
        self.length_read: list[ScatteredDataset] = []
        self.read: list[ScatteredDataset] = []
        self.repeated: list[Any] = []

    def problem(self) -> str | None:
        """Returns why an evaluation with these uses counted an item twice, or None."""
        read_here = {id(part) for part in self.read}
        # A loader reads the length; if no item is read in this process afterwards, its workers read all of them.
        read_by_workers = [part for part in self.length_read if id(part) not in read_here]
        found = next(iter([*self.repeated, *read_by_workers]), None)
        if found is None:
            return None
        return (
            f"the evaluation read {found}, whose repeated item was counted on another rank as well. Pass the loader "
            "or the data set as an argument of the evaluator, which then leaves it out; or evaluate "
            "torchmn.training.without_repeats(data); or scatter it with force_equal_length=False"
        )


# None outside an evaluation. A context variable, because ranks may be threads.
_uses: ContextVar[DatasetUses | None] = ContextVar("uses of scattered data sets", default=None)


def record_repeated_item(part: Any) -> None:
    """Records that the repeated item of a part is read."""
    uses = _uses.get()
    if uses is not None:
        uses.repeated.append(part)


@contextmanager
def record_uses() -> Iterator[DatasetUses]:
    """Context that records how data sets with repeated items are used on this rank."""
    uses = DatasetUses()
    token = _uses.set(uses)
    try:
        yield uses
    finally:
        _uses.reset(token)
