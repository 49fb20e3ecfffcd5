"""The sum over the ranks of one host, through memory that they share.

Each rank lays open what the others add up, adds up and scales its own part of everybody's, and copies the other parts
back. An MPI library does the same with more copies, and with fresh memory for every call. Two ranks with little to add
do it all twice instead: each sees the other's numbers, and they wait for each other only once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from torchmn.communicators.buffers import scale_
from torchmn.communicators.shared_memory import share

CHUNK_BYTES = 2 << 20
_STAGE_BYTES = CHUNK_BYTES + CHUNK_BYTES // 2 + 64  # the largest part that one of two or more ranks adds up
_KEPT_VIEWS = 1000
DTYPES = {
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
}
"""What torch itself can add; MPI adds the others."""


def least_bytes(ranks: int) -> int:
    """How large a sum must be to come here; measured: MPI is faster with less."""
    return 128 << 10 if ranks == 2 else 1 << 20


class SharedSum:
    """The stages of a communicator's ranks. Two each, in turns: while one is still read, the other is written.

    A stage has a place for numbers and one for results, apart: chunks are of different lengths, and the results of one
    are still read while the numbers of the next but one are laid out.
    """

    def __init__(self, comm: MPI.Comm):
        self._comm = comm
        self._rank = comm.rank
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._turn = 0
        # The tensors keep the maps alive.
        maps = share(comm, 2 * _STAGE_BYTES)
        self._stages = [torch.frombuffer(maps[rank], dtype=torch.uint8) for rank in range(len(maps))]
        self._views: dict[tuple[int, torch.dtype, int], _Stages] = {}
        self._whole: dict[tuple[int, torch.dtype, torch.Size], list[Tensor]] = {}

    @property
    def works(self) -> bool:
        """Whether all ranks are on one host that has the room; the same on every rank."""
        return bool(self._stages)

    def sum_(self, source: Tensor, flat: Tensor, scale: float) -> None:
        """Fill `flat` with `scale` times the sum of all ranks' `source`, which may be it; everywhere the same bits."""
        if len(self._others) == 1 and flat.nbytes <= CHUNK_BYTES:
            self.show(source)
            self._comm.Barrier()
            torch.add(source, self.seen(source)[self._others[0]], out=flat)
            scale_(flat, scale)
            return
        length = CHUNK_BYTES // flat.element_size()
        added: _Chunk | None = None
        # A barrier ends two things at once: the addition of a chunk, and the laying out of the next.
        for given, total in zip(source.split(length), flat.split(length), strict=True):
            chunk = self._lay_out(given, total)
            self._comm.Barrier()
            if added is not None:
                self._collect(added)
            self._add_up(chunk, scale)
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
            if len(self._whole) >= _KEPT_VIEWS:
                self._whole.clear()
            start = self._turn * _STAGE_BYTES
            views = [stage[start : start + x.nbytes].view(x.dtype).view(x.shape) for stage in self._stages]
            self._whole[key] = views
        return views

    def _lay_out(self, given: Tensor, total: Tensor) -> _Chunk:
        """Copy to this rank's stage what the other ranks add up."""
        stages = self._next_stages(total.dtype, len(total))
        size = len(self._stages)
        chunk = _Chunk(given.tensor_split(size), total.tensor_split(size), stages)
        mine = stages.numbers[self._rank]
        for rank in self._others:
            mine[rank].copy_(chunk.given[rank])
        return chunk

    def _add_up(self, chunk: _Chunk, scale: float) -> None:
        """Add up this rank's part of everybody's numbers, and lay out the result."""
        me, numbers = self._rank, chunk.stages.numbers
        total = chunk.total[me]
        torch.add(chunk.given[me], numbers[self._others[0]][me], out=total)
        for rank in self._others[1:]:
            total.add_(numbers[rank][me])
        scale_(total, scale)
        chunk.stages.results[me].copy_(total)

    def _collect(self, chunk: _Chunk) -> None:
        """Copy what the other ranks have added up."""
        for rank in self._others:
            chunk.total[rank].copy_(chunk.stages.results[rank])

    def _next_stages(self, dtype: torch.dtype, length: int) -> _Stages:
        """All ranks' stages whose turn it is."""
        views = self._views.get((self._turn, dtype, length))
        if views is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            start, size = self._turn * _STAGE_BYTES, len(self._stages)
            middle, nbytes = start + CHUNK_BYTES, length * dtype.itemsize
            numbers = [stage[start : start + nbytes].view(dtype).tensor_split(size) for stage in self._stages]
            lengths = [part.nbytes for part in numbers[0]]
            rooms = zip(self._stages, lengths, strict=True)
            results = [stage[middle : middle + part].view(dtype) for stage, part in rooms]
            views = self._views[self._turn, dtype, length] = _Stages(numbers, results)
        self._turn = 1 - self._turn
        return views


class _Stages(NamedTuple):
    """Where the ranks lay out one chunk."""

    numbers: list[tuple[Tensor, ...]]  # [rank][part]: what the rank gives to the one that adds up that part
    results: list[Tensor]  # [rank]: the part that the rank has added up


class _Chunk(NamedTuple):
    """One chunk of a sum."""

    given: tuple[Tensor, ...]  # this rank's numbers, in one part per rank
    total: tuple[Tensor, ...]  # where their sums go
    stages: _Stages
