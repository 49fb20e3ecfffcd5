"""Which items of a data set belong to which rank: integers only, the same on every rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """The items `begin..end-1` of one rank. If `repeated` is 1, an earlier rank has the first of them, too."""

    begin: int
    end: int
    repeated: int

    @staticmethod
    def of(total: int, size: int, rank: int, equal: bool) -> Window:
        """Rank `rank`'s share of `total` items on `size` ranks.

        With `equal` all windows have ceil(total / size) items and neighbours overlap in at most one, spread
        evenly over the ranks: size - 1 repeated items at most. Without, the windows are disjoint, and the
        first ones have one item more where the division leaves a rest.
        """
        if not equal:
            length, larger = divmod(total, size)
            begin = rank * length + min(rank, larger)
            return Window(begin, begin + length + (rank < larger), 0)
        length = -(-total // size)
        begin = total * rank // size
        end_before = total * (rank - 1) // size + length if rank > 0 else 0
        return Window(begin, begin + length, max(0, end_before - begin))

    def places(self) -> Tensor:
        """The items in the order in which the rank gets them: a repeated one comes last."""
        begin = self.begin + self.repeated
        return torch.cat([torch.arange(begin, self.end), torch.arange(self.begin, begin)])


def permutation(total: int, seed: int | None) -> Tensor:
    """The order in which items are dealt out: shuffled by `seed`, or as they are."""
    if seed is None:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))
