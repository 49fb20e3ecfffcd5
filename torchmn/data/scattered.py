"""One rank's part of a data set."""

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
    """One rank's part of a data set, itself a map-style data set.

    indices: (len(self),) int64, each item's place in the whole data set
    repeated: how many items, the last ones, another rank has as its own: an exact evaluation leaves them out
    global_length: number of items in the whole data set
    """

    def __init__(
        self, source: Any, indices: Tensor, repeated: int, global_length: int, places: Tensor | None = None
    ) -> None:
        self.source = source
        self.indices = indices
        self.repeated = repeated
        self.global_length = global_length
        # Where in `source` each item is: the whole data set, or only what was sent to this rank.
        self._places = torch.arange(len(indices)) if places is None else places

    @property
    def unique_length(self) -> int:
        """Number of items that are this rank's own; summed over ranks, the length of the whole data set."""
        return len(self.indices) - self.repeated

    def unique(self) -> ScatteredDataset:
        """This part without its repeated items: over all ranks, every item of the whole data set exactly once."""
        own, part = self.unique_length, copy(self)
        part.indices, part.repeated, part._places = self.indices[:own], 0, self._places[:own]
        return part

    def __len__(self) -> int:
        if self.repeated and (uses := _uses.get()) is not None:
            uses.measured.append(self)
        return len(self.indices)

    def __getitem__(self, index: int | slice) -> Any:
        """One item, or a list of those of a slice."""
        if isinstance(index, slice):
            return list(self.__getitems__(range(*index.indices(len(self.indices)))))
        place = self._places[index]
        if self.repeated:
            self._note([int(index)])
        return self.source[int(place)]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """The items of one batch, as a `DataLoader` asks for them."""
        places = self._places[torch.as_tensor(indices, dtype=torch.int64)].tolist()
        if self.repeated:
            self._note(indices)
        several = getattr(self.source, "__getitems__", None)
        return several(places) if several else [self.source[place] for place in places]

    def _note(self, indices: Sequence[int]) -> None:
        uses = _uses.get()
        if uses is not None:
            uses.read.append(self)
            if any(int(index) % len(self.indices) >= self.unique_length for index in indices):
                uses.repeated.append(self)

    def __repr__(self) -> str:
        repeats = f", {self.repeated} repeated" if self.repeated else ""
        held = f"{len(self.indices)} of {self.global_length} items{repeats}"
        return f"ScatteredDataset({held}; {type(self.source).__name__})"


class Uses:
    """How data sets with repeated items were used: their length asked for, items read, repeated ones read."""

    def __init__(self) -> None:
        self.measured: list[ScatteredDataset] = []
        self.read: list[ScatteredDataset] = []
        self.repeated: list[ScatteredDataset] = []

    def problem(self) -> str | None:
        """Why an evaluation that made these uses counted an item twice, or None."""
        here = {id(part) for part in self.read}
        # A loader asks for the length; if nothing is read in this process afterwards, its workers read all of it.
        elsewhere = [part for part in self.measured if id(part) not in here]
        found = next(iter(self.repeated + elsewhere), None)
        if found is None:
            return None
        return (
            f"the evaluation read {found}, whose repeated item was counted on another rank, too. Pass the loader or "
            "the data set as an argument of the evaluator, which then leaves it out; or evaluate "
            "torchmn.training.without_repeats(data); or scatter it with force_equal_length=False"
        )


# None outside an evaluation. Each thread has its own: ranks may be threads.
_uses: ContextVar[Uses | None] = ContextVar("uses of scattered data sets", default=None)


@contextmanager
def noted_uses() -> Iterator[Uses]:
    """Collects how data sets with repeated items are used on this rank while it lasts."""
    uses = Uses()
    token = _uses.set(uses)
    try:
        yield uses
    finally:
        _uses.reset(token)
