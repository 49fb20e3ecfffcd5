"""The sum over the ranks of one host, through memory that they share.

Each rank lays open what the others add up, adds up and scales its own part of everybody's, and copies the other parts
back. An MPI library does the same with more copies, and with fresh memory for every call.
"""

from __future__ import annotations

import torch
from mpi4py import MPI
from torch import Tensor

from torchmn.communicators.shared_memory import share

CHUNK_BYTES = 2 << 20
_KEPT_VIEWS = 1000
DTYPES = {
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
}
"""What torch itself can add; MPI adds the others."""


class SharedSum:
    """The stages of a communicator's ranks. Two each, in turns: while one is still read, the other is written."""

    def __init__(self, comm: MPI.Comm):
        self._comm = comm
        self._turn = 0
        # The tensors keep the maps alive.
        maps = share(comm, 2 * CHUNK_BYTES)
        self._stages = [torch.frombuffer(maps[rank], dtype=torch.uint8) for rank in range(len(maps))]
        self._views: dict[tuple[int, torch.dtype, int], list[tuple[Tensor, ...]]] = {}

    @property
    def works(self) -> bool:
        """Whether all ranks are on one host that has the room; the same on every rank."""
        return bool(self._stages)

    def sum_(self, source: Tensor, flat: Tensor, scale: float) -> None:
        """Fill `flat` with `scale` times the sum of all ranks' `source`, which may be it; everywhere the same bits."""
        length = CHUNK_BYTES // flat.element_size()
        for given, chunk in zip(source.split(length), flat.split(length), strict=True):
            self._sum_chunk(given, chunk, scale)

    def _sum_chunk(self, given: Tensor, chunk: Tensor, scale: float) -> None:
        stages = self._parts_of_stages(chunk.dtype, len(chunk))
        self._turn = 1 - self._turn
        size, me = len(stages), self._comm.rank
        mine, totals = given.tensor_split(size), chunk.tensor_split(size)
        others = [rank for rank in range(size) if rank != me]
        for rank in others:  # each rank adds up its own part, so nobody needs mine of that
            stages[me][rank].copy_(mine[rank])
        self._comm.Barrier()
        total = totals[me]
        torch.add(mine[me], stages[others[0]][me], out=total)
        for rank in others[1:]:
            total.add_(stages[rank][me])
        if scale != 1.0:
            total.mul_(scale)
        stages[me][me].copy_(total)
        self._comm.Barrier()
        for rank in others:
            totals[rank].copy_(stages[rank][rank])

    def _parts_of_stages(self, dtype: torch.dtype, length: int) -> list[tuple[Tensor, ...]]:
        """[rank][part] of the stages whose turn it is."""
        views = self._views.get((self._turn, dtype, length))
        if views is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            start = self._turn * CHUNK_BYTES
            end = start + length * dtype.itemsize
            views = [stage[start:end].view(dtype).tensor_split(len(self._stages)) for stage in self._stages]
            self._views[self._turn, dtype, length] = views
        return views
