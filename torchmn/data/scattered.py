"""One rank's part of a data set."""

from __future__ import annotations

from collections.abc import Sequence
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
        return len(self) - self.repeated

    def unique(self) -> ScatteredDataset:
        """This part without its repeated items: over all ranks, every item of the whole data set exactly once."""
        own = self.unique_length
        return ScatteredDataset(self.source, self.indices[:own], 0, self.global_length, self._places[:own])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int | slice) -> Any:
        """One item, or a list of those of a slice."""
        if isinstance(index, slice):
            return list(self.__getitems__(range(*index.indices(len(self)))))
        return self.source[int(self._places[index])]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """The items of one batch, as a `DataLoader` asks for them."""
        places = self._places[torch.as_tensor(indices, dtype=torch.int64)].tolist()
        several = getattr(self.source, "__getitems__", None)
        return several(places) if several else [self.source[place] for place in places]

    def __repr__(self) -> str:
        repeats = f", {self.repeated} repeated" if self.repeated else ""
        return f"ScatteredDataset({len(self)} of {self.global_length} items{repeats}; {type(self.source).__name__})"
