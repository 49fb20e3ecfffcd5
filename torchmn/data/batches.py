"""The batches of each epoch and a rank's rows of them, in an order that does not depend on the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchmn.data.partition import IndexRange


@dataclass(frozen=True)
class BatchSchedule:
    """The batches of every epoch, which depend on these numbers only, so that a run can resume at any step."""

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

    @property
    def last_whole(self) -> int:
        """Number of the last batch of an epoch with `batch_size` samples; 0 if there is none."""
        return max(self.count // self.batch_size - 1, 0)

    def order(self, epoch: int) -> np.ndarray:
        """Returns the indices of all samples in the order of an epoch: (count,)."""
        if not self.shuffle:
            return np.arange(self.count)
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)

    def rows(self, order: np.ndarray, number: int) -> np.ndarray:
        """Returns the indices of the samples of batch `number`, at most batch_size of them."""
        return order[number * self.batch_size : (number + 1) * self.batch_size]


def rank_slice(total: int, size: int, rank: int) -> slice:
    """Returns the slice of `total` rows that belongs to `rank` of `size`: balanced, in order, possibly empty."""
    rows = IndexRange.of(total, size, rank, equal=False)
    return slice(rows.begin, rows.end)
