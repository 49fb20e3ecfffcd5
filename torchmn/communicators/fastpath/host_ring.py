"""All-reduce between hosts in a ring: `HostRing`.

The ranks of a host reduce to the first of them, these first ranks form a ring, and each broadcasts the result on its
host. In the ring the buffer is split into one block per host. Blocks are reduced while they travel once around, and
then the results travel around. So each host sends and receives about twice the buffer, in both directions of its link
at once, however many ranks it has: no algorithm sends less. MPI libraries choose other algorithms, for low latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from torchmn.communicators.transports.mpi import memory

_MIN_BLOCK_BYTES = 128 << 10
"""Smaller blocks are sent in less time than a step around the ring takes to start: MPI is faster."""
_PIECE_BYTES = 32 << 10
"""Size of a message. MPI asks the receiver before it sends a larger one, and over TCP the answer queues behind the data
that the receiver itself is sending: both directions of the link take turns."""


class HostRing:
    """The communicators of MPI between the ranks of this host, and between the first ranks of all hosts.

    Args:
        comm: the ranks, all of which must call.
        hosts: the host name of each rank.
    """

    def __init__(self, comm: MPI.Comm, hosts: Sequence[str]):
        names = list(dict.fromkeys(hosts))
        self._size = len(names)
        self._on_host = comm.Split(names.index(hosts[comm.rank]), comm.rank)
        self._ring = comm.Split(0 if self._on_host.rank == 0 else MPI.UNDEFINED, comm.rank)

    def reduce_(self, source: Tensor, out: Tensor, datatype: MPI.Datatype, op: MPI.Op) -> None:
        """Reduces contiguous `source` over all ranks into contiguous `out`, which may be the same.

        The result has the same bits on all ranks: each block is reduced by one rank per host, in one order.
        """
        target: Any = [memory(out), datatype]
        if self._on_host.size > 1:
            given: Any = [memory(source), datatype]
            if self._on_host.rank > 0:
                self._on_host.Reduce(given, None, op)
            else:
                self._on_host.Reduce(MPI.IN_PLACE if source is out else given, target, op)
        elif source is not out:
            out.copy_(source)
        if self._ring != MPI.COMM_NULL:
            self._reduce_in_ring(out.view(-1), datatype, op)
        if self._on_host.size > 1:
            self._on_host.Bcast(target)

    def _reduce_in_ring(self, flat: Tensor, datatype: MPI.Datatype, op: MPI.Op) -> None:
        rank, size = self._ring.rank, self._size
        blocks = flat.tensor_split(size)
        received = torch.empty_like(blocks[0])  # the first block is the longest
        for step in range(size - 1):
            given, taken = blocks[(rank - step) % size], blocks[(rank - step - 1) % size]
            incoming = received[: len(taken)]
            self._swap(given, incoming, datatype)
            op.Reduce_local([memory(incoming), datatype], [memory(taken), datatype])
        for step in range(size - 1):
            self._swap(blocks[(rank + 1 - step) % size], blocks[(rank - step) % size], datatype)

    def _swap(self, outgoing: Tensor, incoming: Tensor, datatype: MPI.Datatype) -> None:
        """Sends a block to the next host while receiving one from the previous host."""
        left, right = (self._ring.rank - 1) % self._size, (self._ring.rank + 1) % self._size
        requests = [self._ring.Irecv([memory(piece), datatype], left) for piece in _pieces(incoming)]
        requests += [self._ring.Isend([memory(piece), datatype], right) for piece in _pieces(outgoing)]
        MPI.Request.Waitall(requests)

    @property
    def comms(self) -> list[MPI.Comm]:
        """The communicators of MPI, in the order in which all ranks free them."""
        return [comm for comm in (self._on_host, self._ring) if comm != MPI.COMM_NULL]


def _pieces(block: Tensor) -> Sequence[Tensor]:
    return block.split(_PIECE_BYTES // block.element_size())


def is_faster(x: Tensor, hosts: int) -> bool:
    """Returns whether the ring is faster than MPI's algorithm between this number of hosts."""
    return hosts > 1 and x.is_cpu and x.nbytes >= hosts * _MIN_BLOCK_BYTES
