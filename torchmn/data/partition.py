"""Which items of a data set belong to which rank, by integer arithmetic; and the seed of a common random order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator


class IndexRange(NamedTuple):
    """The items `begin..end-1` of a rank. If `repeated` is 1, the first of them belongs to an earlier rank as well."""

    begin: int
    end: int
    repeated: int

    @staticmethod
    def of(total: int, size: int, rank: int, equal: bool) -> IndexRange:
        """Returns the range of rank `rank` in `range(total)`, for `size` ranks.

        Args:
            total: number of items of all ranks.
            size: number of ranks.
            rank: the rank whose range to return.
            equal: all ranges have ceil(total / size) items, and neighbours overlap in at most one; at most size - 1
                items are repeated, evenly spread over the ranks. Otherwise ranges are disjoint, and the first
                total % size of them have one item more.
        """
        if not equal:
            length, larger = divmod(total, size)
            begin = rank * length + min(rank, larger)
            return IndexRange(begin, begin + length + (rank < larger), 0)
        length = -(-total // size)
        begin = total * rank // size
        end_before = total * (rank - 1) // size + length if rank > 0 else 0
        return IndexRange(begin, begin + length, max(0, end_before - begin))

    def indices(self) -> Tensor:
        """Returns the items in the order of the rank's part, a repeated one last: (end - begin,) int64."""
        begin = self.begin + self.repeated
        return torch.cat([torch.arange(begin, self.end), torch.arange(self.begin, begin)])


def permutation(total: int, seed: int | None) -> Tensor:
    """Returns `range(total)`, shuffled by `seed` unless that is None: (total,) int64."""
    if seed is None:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


def draw_seed(comm: Communicator, root: int = 0) -> int:
    """Returns a new seed, the same on all ranks: the next number of root's torch generator.

    With `torch.manual_seed`, a run is therefore repeatable. Every rank draws a number from its generator, so that
    generators in the same state stay in the same state; of ranks that are threads of one process, only root draws.
    """
    seed = None
    if comm.rank == root or not comm.traits.shares_process:
        seed = int(torch.randint(1 << 62, (), generator=torch.random.default_generator, device="cpu"))
    return comm.bcast_obj(seed if comm.rank == root else None, root)
