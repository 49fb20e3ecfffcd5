"""A data set of nothing, for ranks whose input comes from other ranks."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from torch.utils.data import Dataset

from torchmn.errors import ArgumentError


class EmptyDataset(Dataset[tuple[()]]):
    """`length` empty tuples."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """An empty tuple, or a list of those of a slice."""
        if isinstance(index, slice):
            return [()] * len(range(self.length)[index])
        if not -self.length <= index < self.length:
            raise IndexError(f"item {index} of an empty data set of length {self.length}")
        return ()

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[()]]:
        return [self[index] for index in indices]

    def __repr__(self) -> str:
        return f"EmptyDataset({self.length})"


def create_empty_dataset(dataset: Sized) -> EmptyDataset:
    """A data set as long as `dataset` whose items are empty tuples.

    It drives a rank that computes on what it receives as often as the others. An ordinary `DataLoader` turns a
    batch of empty tuples into an empty list, so `model(*batch)` calls the model with no arguments.
    """
    try:
        return EmptyDataset(len(dataset))
    except TypeError as error:
        raise ArgumentError(
            f"create_empty_dataset: expected a data set with a length, got {type(dataset).__name__}: {error}"
        ) from None
