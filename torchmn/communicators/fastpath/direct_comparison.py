"""Compares numbers of a few ranks by direct messages, on which small tensors piggyback: `DirectComparison`.

Each rank sends one message to every other rank. With two ranks that is the minimum for a reduction, so the comparison
of arguments costs nothing extra. Messages may have different lengths: ranks in different operations still compare
numbers.
"""

from __future__ import annotations

import ctypes

import torch
from mpi4py import MPI
from torch import Tensor

MAX_RANKS = 4  # with more ranks, a tree of messages is faster
CARRIED_BYTES = 8 << 10
_START = 16  # bytes of the number, padded so that the tensor after it is aligned
_TAG = 1  # exchanges of buffers between the same ranks use 0
_CACHED_VIEWS = 1000
_memmove, _BYTE = ctypes.memmove, MPI.BYTE


class DirectComparison:
    """One rank's send and receive buffers. No other messages of the communicator may have its tag."""

    def __init__(self, comm: MPI.Comm):
        self._comm = comm
        self._rank = comm.rank
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        buffers = [torch.zeros(_START + CARRIED_BYTES, dtype=torch.uint8, device="cpu") for _ in range(comm.size)]
        self._buffers = buffers
        self._numbers = [buffer.view(torch.int64).numpy().data for buffer in buffers]
        self._specs = [[MPI.memory.fromaddress(b.data_ptr(), b.nbytes), b.nbytes, MPI.BYTE] for b in buffers]
        self._own_memory = self._specs[comm.rank][0]
        self._address = buffers[comm.rank].data_ptr() + _START
        self._views: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}

    def equal(self, number: int, carried: Tensor | None) -> bool:
        """Returns whether all ranks passed this number. If so, `parts` returns their `carried`, which is contiguous."""
        comm, numbers = self._comm, self._numbers
        numbers[self._rank][0] = number
        end = _START
        if carried is not None:
            nbytes = carried.nbytes
            end += nbytes
            _memmove(self._address, carried.data_ptr(), nbytes)
        spec = [self._own_memory, end, _BYTE]
        if len(numbers) == 2:
            peer = 1 - self._rank
            comm.Sendrecv(spec, peer, _TAG, self._specs[peer], peer, _TAG)
            return numbers[peer][0] == number
        requests = [comm.Irecv(self._specs[peer], peer, _TAG) for peer in self._others]
        requests += [comm.Isend(spec, peer, _TAG) for peer in self._others]
        MPI.Request.Waitall(requests)
        return all(numbers[peer][0] == number for peer in self._others)

    def parts(self, carried: Tensor) -> list[Tensor]:
        """Returns all ranks' tensors of the last comparison, in rank order. The next comparison overwrites them."""
        dtype, shape = carried.dtype, carried.shape
        views = self._views.get((dtype, shape))
        if views is None:
            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()  # shapes that never repeat must not fill the memory
            end = _START + shape.numel() * dtype.itemsize
            views = [buffer[_START:end].view(dtype).view(shape) for buffer in self._buffers]
            self._views[dtype, shape] = views
        return views
