"""A data set of empty tuples, for ranks whose model gets its input from other ranks."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from torch.utils.data import Dataset

from torchmn.errors import ArgumentError


class EmptyDataset(Dataset[tuple[()]]):
    """A map-style data set of `length` empty tuples."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """Returns an empty tuple, or for a slice a list of them."""
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
    """Returns a data set as long as `dataset` whose items are empty tuples.

    A rank without input data, such as a later stage of a pipeline, iterates over it and so makes as many
    steps as the others. A `DataLoader` collates empty tuples to an empty list: `model(*batch)` gets no arguments.

    Args:
        dataset: anything with a length.

    Returns:
        The data set, for ranks whose part of the model takes no input.

    Raises:
        ArgumentError: if `dataset` has no length.
    """
    try:
        return EmptyDataset(len(dataset))
    except TypeError as error:
        raise ArgumentError(
            f"create_empty_dataset: expected a data set with a length, got {type(dataset).__name__}: {error}"
        ) from None
