"""`EpochIterator`, the base class of iterators: a `for` loop is over one epoch, and `next` continues indefinitely."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class EpochIterator(ABC):
    """Batches, epoch by epoch.

    A `for` loop is over one epoch. `next(iterator)` returns the next batch, and after the last batch of an epoch the
    first of the next one, as Chainer's iterators do; but if the loader has no length, it raises StopIteration between
    two epochs. A loop after a `next` begins a new epoch.

    Attributes:
        epoch: number of the current epoch, from 0.
        position: number of batches of this epoch that were returned.
        is_new_epoch: whether the last batch that `next` returned was the last one of an epoch.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0
        self.is_new_epoch = False
        self._batches: Iterator[Any] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _one_epoch(self) -> Iterator[Any]:
        """Yields the batches of the current epoch from `position` on; at its end `epoch` is one more."""

    @abstractmethod
    def _restart(self) -> None:
        """Prepares for a new epoch at any position of the current one."""

    def __iter__(self) -> Iterator[Any]:
        """Iterates over one epoch; after `load_state_dict`, over the rest of the saved epoch."""
        self._batches = None
        return self._one_epoch()

    def __next__(self) -> Any:
        length, self.is_new_epoch = self._known_length(), False
        if self._batches is None:
            self._batches = self._one_epoch()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            raise
        if self.position == length:
            next(self._batches, None)  # ends the epoch
            self._batches, self.is_new_epoch = None, True
        return batch

    def next(self) -> Any:
        """Returns `next(iterator)`."""
        return self.__next__()

    @property
    def epoch_detail(self) -> float:
        """The number of epochs, with the fraction of the current one."""
        length = self._known_length()
        return self.epoch + (self.position / length if length else 0.0)

    def reset(self) -> None:
        """Starts again with epoch 0, in the order of a new epoch; every rank must call it."""
        self._restart()
        self.epoch, self.position, self.is_new_epoch, self._batches = 0, 0, False, None

    def _known_length(self) -> int | None:
        """Returns the number of batches of an epoch; None if it is unknown."""
        try:
            return len(self)
        except TypeError:
            return None
