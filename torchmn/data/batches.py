"""The batches of each epoch and a rank's rows of them, in an order that does not depend on the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchmn.data.partition import IndexRange


@dataclass(frozen=True)
class Batches:
    """The batches of every epoch, determined by these numbers alone, so that a run can resume at any step."""

    count: int
    batch_size: int
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False

    @property
    def steps(self) -> int:
        """Number of batches of an epoch."""
        full, rest = divmod(self.count, self.batch_size)
        return full if self.drop_last and full else full + (rest > 0)

    def order(self, epoch: int) -> np.ndarray:
        """Returns the indices of all samples in the order of an epoch: (count,)."""
        if not self.shuffle:
            return np.arange(self.count)
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)

    def rows(self, order: np.ndarray, number: int) -> np.ndarray:
        """Returns the indices of the samples of batch `number`, at most batch_size of them."""
        return order[number * self.batch_size : (number + 1) * self.batch_size]


def share(total: int, parts: int, place: int) -> slice:
    """Returns rank `place`'s slice of `total` rows, split evenly and in order over `parts` ranks; may be empty."""
    rows = IndexRange.of(total, parts, place, equal=False)
    return slice(rows.begin, rows.end)
