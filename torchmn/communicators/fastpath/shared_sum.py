"""The sum over the ranks of one host, through memory that they share.

Each rank lays out what the others add up, scaled where that is exact, adds up its own part of everybody's, puts the
result where each of them had laid out its numbers, and copies from its own stage what the others have put there. An MPI
library does the same with more copies, and with fresh memory for every call. Two ranks with little to add do it all
twice instead: each sees the other's numbers, and they wait for each other only once.
"""

from __future__ import annotations

from math import frexp
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from torchmn.communicators.fastpath.shared_memory import share
from torchmn.communicators.messages.reductions import scale_

CHUNK_BYTES = 1 << 20
"""The size of a stage. Half as much costs a large sum a fifth of its speed; the stages count in every rank's memory."""
_KEPT_VIEWS = 4000  # tensors, of which an entry has one per rank, or one per rank and part; or at least 8 entries
DTYPES = {
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
}
"""What torch itself can add; MPI adds the others."""


def takes(x: Tensor, ranks: int) -> bool:
    """Returns whether a sum is better made here; measured: MPI is faster with less."""
    return x.nbytes >= (128 << 10 if ranks == 2 else 1 << 20) and x.dtype in DTYPES


class SharedSum:
    """The stages of a communicator's ranks. Two each, in turns: while one is still read, the other is written.

    What a rank lays out for another, only that one reads, and its result, put in the same place, only the rank itself:
    so it may lay out the next numbers there as soon as it has copied the results.
    """

    def __init__(self, comm: MPI.Comm):
        self._comm = comm
        self._rank = comm.rank
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._turn = 0
        maps = share(comm, 2 * CHUNK_BYTES)  # the tensors keep them alive
        # An evaluation may come first, and what is made under its inference mode can not be written outside of it.
        with torch.inference_mode(False):
            self._stages = [torch.frombuffer(maps[rank], dtype=torch.uint8) for rank in range(len(maps))]
        self._parts: dict[tuple[int, torch.dtype, int], _Stages] = {}
        self._whole: dict[tuple[int, torch.dtype, torch.Size], list[Tensor]] = {}

    @property
    def works(self) -> bool:
        """Whether all ranks are on one host that has the room; the same on every rank."""
        return bool(self._stages)

    def sum_(self, source: Tensor, flat: Tensor, scale: float) -> None:
        """Fill `flat` with `scale` times the sum of all ranks' `source`, which may be it; everywhere the same bits."""
        before, after = (scale, 1.0) if _is_power_of_two(scale) else (1.0, scale)
        if len(self._others) == 1 and flat.nbytes <= CHUNK_BYTES:
            _put(source, before, self._shown(source)[self._rank])
            self._comm.Barrier()
            first, second = self.seen(source)
            torch.add(first, second, out=flat)
            scale_(flat, after)
            return
        totals = flat.split(CHUNK_BYTES // flat.element_size())
        givens = totals if source.data_ptr() == flat.data_ptr() else source.split(len(totals[0]))
        added: _Chunk | None = None
        # A barrier ends two things at once: the addition of a chunk, and the laying out of the next.
        for given, total in zip(givens, totals, strict=True):
            chunk = self._lay_out(given, total, before)
            self._comm.Barrier()
            if added is not None:
                self._collect(added)
            self._add_up(chunk, before, after)
            added = chunk
        self._comm.Barrier()
        if added is not None:
            self._collect(added)

    def show(self, x: Tensor) -> None:
        """Let the other ranks see `x`, of at most CHUNK_BYTES, once they know that they may look."""
        self._shown(x)[self._rank].copy_(x)

    def seen(self, x: Tensor) -> list[Tensor]:
        """All ranks' tensors that were shown like `x`, in rank order, once all ranks know that they have been.

        They are valid until the next call but one that all ranks make.
        """
        shown = self._shown(x)
        self._turn = 1 - self._turn  # not before: a rank that shows something alone gets no answer, and no turn
        return shown

    def _shown(self, x: Tensor) -> list[Tensor]:
        key = (self._turn, x.dtype, x.shape)
        views = self._whole.get(key)
        if views is None:
            if len(self._whole) >= max(8, _KEPT_VIEWS // len(self._stages)):
                self._whole.clear()
            start = self._turn * CHUNK_BYTES
            with torch.inference_mode(False):
                views = [stage[start : start + x.nbytes].view(x.dtype).view(x.shape) for stage in self._stages]
            self._whole[key] = views
        return views

    def _lay_out(self, given: Tensor, total: Tensor, scale: float) -> _Chunk:
        """Put on this rank's stage what the other ranks add up."""
        stages = self._next_stages(total.dtype, len(total))
        size = len(self._stages)
        parts = total.tensor_split(size)
        chunk = _Chunk(parts if given is total else given.tensor_split(size), parts, stages)
        mine = stages[self._rank]
        for rank in self._others:
            _put(chunk.given[rank], scale, mine[rank])
        return chunk

    def _add_up(self, chunk: _Chunk, before: float, after: float) -> None:
        """Add up this rank's part of everybody's numbers, and give the result to everybody."""
        me = self._rank
        total, theirs = chunk.total[me], [chunk.stages[rank][me] for rank in self._others]
        torch.add(theirs[0], chunk.given[me], alpha=1 if before == 1.0 else before, out=total)  # ints take no float
        for numbers in theirs[1:]:
            total.add_(numbers)
        scale_(total, after)
        for place in theirs:
            place.copy_(total)

    def _collect(self, chunk: _Chunk) -> None:
        """Copy what the other ranks have added up."""
        mine = chunk.stages[self._rank]
        for rank in self._others:
            chunk.total[rank].copy_(mine[rank])

    def _next_stages(self, dtype: torch.dtype, length: int) -> _Stages:
        """All ranks' stages whose turn it is."""
        views = self._parts.get((self._turn, dtype, length))
        if views is None:
            if len(self._parts) >= max(8, _KEPT_VIEWS // len(self._stages) ** 2):
                self._parts.clear()
            start, size = self._turn * CHUNK_BYTES, len(self._stages)
            end = start + length * dtype.itemsize
            with torch.inference_mode(False):
                views = [stage[start:end].view(dtype).tensor_split(size) for stage in self._stages]
            self._parts[self._turn, dtype, length] = views
        self._turn = 1 - self._turn
        return views


def _is_power_of_two(scale: float) -> bool:
    """Whether numbers may be scaled before they are added: not by a third, or what cancels out would leave rounding."""
    return frexp(scale)[0] == 0.5


def _put(source: Tensor, scale: float, into: Tensor) -> None:
    """Scale numbers where they are copied anyway: to scale their sum would be one more pass over memory."""
    if scale == 1.0:
        into.copy_(source)
    else:
        torch.mul(source, scale, out=into)


_Stages = list[tuple[Tensor, ...]]
"""[rank][part]: what the rank gives to the one that adds up that part, and then the result."""


class _Chunk(NamedTuple):
    """One chunk of a sum."""

    given: tuple[Tensor, ...]  # this rank's numbers, in one part per rank
    total: tuple[Tensor, ...]  # where their sums go
    stages: _Stages
