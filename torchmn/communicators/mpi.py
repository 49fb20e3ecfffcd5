"""The MPI transport: mpi4py on MPICH, Open MPI, Intel MPI, ...

`mpi_messages` sends from one rank to another; here is what all ranks do together.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from mpi4py import MPI
from torch import Tensor

from torchmn.communicators import reductions, shared_sum
from torchmn.communicators.base import Communicator
from torchmn.communicators.buffers import scale_
from torchmn.communicators.direct_meeting import CARRIED_BYTES, MOST_RANKS, DirectMeeting
from torchmn.communicators.mpi_library import reads_gpu_memory
from torchmn.communicators.mpi_messages import MPIMessages, memory
from torchmn.communicators.outbox import Outbox
from torchmn.communicators.settings import Settings
from torchmn.communicators.shared_sum import SharedSum
from torchmn.communicators.topology import Place
from torchmn.communicators.transport import Exchange

_OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
_DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}


@dataclass
class _Requests:
    """An exchange on its way, with the buffers that it reads and writes."""

    comm: MPICommunicator
    receives: list[MPI.Request]
    sends: list[MPI.Request]
    outgoing: Mapping[int, Tensor]
    incoming: Mapping[int, Tensor]

    def wait(self) -> None:
        MPI.Request.Waitall(self.receives + self.sends)

    def wait_received(self) -> None:
        MPI.Request.Waitall(self.receives)
        for (peer, x), send in zip(self.outgoing.items(), self.sends, strict=True):
            self.comm._keep(peer, None, [send], x)


class MPICommunicator(MPIMessages):
    """Ranks that an MPI launcher started."""

    def __init__(self, place: Place, settings: Settings, point_to_point: MPI.Comm, outbox: Outbox):
        # Two communicators, so that a user's messages never meet those of a collective operation.
        self._collective = point_to_point.Dup()
        super().__init__(place, settings, point_to_point, outbox)
        self.reads_gpu_memory = reads_gpu_memory()
        self._meeting = DirectMeeting(self._collective) if 1 < self.size <= MOST_RANKS else None
        self.carried_bytes = CARRIED_BYTES if self._meeting else 0
        self._number = array("q", (0, 0))
        self._number_buffer = [self._number, 2, MPI.INT64_T]
        self._shared_sum: SharedSum | None = None  # made by the first sum that is large enough

    # -- collective operations ---------------------------------------------------------------------------------

    def _exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        self._start_exchange(outgoing, incoming).wait()

    def _start_exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Exchange:
        if self._pending:
            self._release_delivered()
        receives = [self._collective.Irecv([memory(x), MPI.BYTE], peer) for peer, x in incoming.items()]
        sends = [self._collective.Isend([memory(x), MPI.BYTE], peer) for peer, x in outgoing.items()]
        return _Requests(self, receives, sends, outgoing, incoming)

    def _same_everywhere(self, number: int) -> bool:
        if self._meeting is not None:
            return self._meeting.agree(number, None)
        # max(n) == min(n) in one reduction: the minimum is the negated maximum of the negated numbers.
        numbers = self._number
        numbers[0], numbers[1] = number, -number
        self._collective.Allreduce(MPI.IN_PLACE, self._number_buffer, MPI.MAX)
        return numbers[0] == -numbers[1]

    def _same_everywhere_carrying(self, number: int, carried: Tensor) -> bool:
        assert self._meeting is not None
        if carried.nbytes <= CARRIED_BYTES:
            return self._meeting.agree(number, carried)
        assert self._shared_sum is not None
        self._shared_sum.show(carried)
        return self._meeting.agree(number, None)

    def _carried_parts(self, carried: Tensor) -> list[Tensor]:
        assert self._meeting is not None
        if carried.nbytes <= CARRIED_BYTES:
            return self._meeting.parts(carried.dtype, carried.shape)
        assert self._shared_sum is not None
        return self._shared_sum.seen(carried)

    def _barrier(self) -> None:
        self._collective.Barrier()

    def _bcast_(self, flat: Tensor, root: int) -> None:
        self._collective.Bcast([memory(flat), MPI.BYTE], root)

    def _reduces(self, dtype: torch.dtype, op: str) -> bool:
        return dtype in _DATATYPES and not reductions.may_lose_nan(dtype, op)

    def _allreduce_(self, source: Tensor, x: Tensor, op: str, scale: float = 1.0) -> None:
        large = op == "sum" and x.nbytes >= shared_sum.least_bytes(self.size) and x.dtype in shared_sum.DTYPES
        if large and x.is_cpu and self.inter_size == 1 < self.size:
            if self._shared_sum is None:
                self._shared_sum = SharedSum(self._collective)
                if self._shared_sum.works and self.size == 2:  # with more ranks, it is faster to divide the work
                    self.carried_bytes = shared_sum.CHUNK_BYTES
            if self._shared_sum.works:
                self._shared_sum.sum_(source.view(-1), x.view(-1), scale)
                return
        given = MPI.IN_PLACE if source is x else [memory(source), _DATATYPES[x.dtype]]
        self._collective.Allreduce(given, [memory(x), _DATATYPES[x.dtype]], _OPERATIONS[op])
        scale_(x, scale)

    def _allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        sizes = [count * flat.element_size() for count in counts]
        if len(set(sizes)) == 1:
            self._collective.Allgather([memory(flat), MPI.BYTE], [memory(whole), MPI.BYTE])
        else:
            self._collective.Allgatherv([memory(flat), MPI.BYTE], [memory(whole), sizes, MPI.BYTE])

    def _subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> Communicator | None:
        if color is None:
            self._collective.Split(MPI.UNDEFINED, 0)
            return None
        members = members_of[color]
        # MPI's colors are not negative; ours may be any int.
        group = self._collective.Split(sorted(members_of).index(color), members.index(self.rank))
        return MPICommunicator(self._place.among(members, name), replace(self.settings), group, self._outbox)

    def _close(self) -> None:
        if not MPI.Is_finalized():
            self._p2p.Free()
            self._collective.Free()


def end_job(status: int) -> None:
    """End every process of the MPI job."""
    MPI.COMM_WORLD.Abort(status)
