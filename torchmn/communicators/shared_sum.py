"""The sum over the ranks of one host, through memory that they share.

Each rank lays its numbers open, adds up and scales its part of everybody's, and copies the other parts back. An MPI
library does the same with more copies, and with fresh memory for every call.
"""

from __future__ import annotations

import torch
from mpi4py import MPI
from torch import Tensor

from torchmn.communicators.shared_memory import share

CHUNK_BYTES = 2 << 20
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
        start = self._turn * CHUNK_BYTES
        self._turn = 1 - self._turn
        views = [stage[start : start + chunk.nbytes].view(chunk.dtype) for stage in self._stages]
        stages = [view.tensor_split(len(views)) for view in views]  # [rank][part]
        parts = chunk.tensor_split(len(views))
        me = self._comm.rank
        others = [rank for rank in range(len(views)) if rank != me]
        views[me].copy_(given)
        self._comm.Barrier()
        mine = parts[me]
        torch.add(stages[me][me], stages[others[0]][me], out=mine)
        for rank in others[1:]:
            mine.add_(stages[rank][me])
        if scale != 1.0:
            mine.mul_(scale)
        stages[me][me].copy_(mine)
        self._comm.Barrier()
        for rank in others:
            parts[rank].copy_(stages[rank][rank])
