"""Which samples are in which batch, and which of them are this rank's: the same order at any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchmn.data.partition import Window


@dataclass(frozen=True)
class Batches:
    """The batches of every epoch. They depend on nothing but these numbers, so that a run can go on anywhere."""

    count: int
    batch_size: int
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False

    @property
    def steps(self) -> int:
        """How many batches an epoch has."""
        full, rest = divmod(self.count, self.batch_size)
        return full if self.drop_last and full else full + (rest > 0)

    def order(self, epoch: int) -> np.ndarray:
        """The samples in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.count)
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)

    def rows(self, order: np.ndarray, number: int) -> np.ndarray:
        """The samples of the `number`-th batch."""
        return order[number * self.batch_size : (number + 1) * self.batch_size]


def share(total: int, parts: int, place: int) -> slice:
    """Which of `total` rows are those of one of `parts` ranks: balanced, in order, maybe none."""
    window = Window.of(total, parts, place, equal=False)
    return slice(window.begin, window.end)
