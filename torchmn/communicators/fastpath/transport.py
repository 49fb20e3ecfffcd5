"""`HostTransport`, an MPI transport that uses shared memory on a host, and a ring between hosts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from time import sleep

from mpi4py import MPI
from torch import Tensor

from torchmn.communicators.fastpath import host_ring, shared_sum
from torchmn.communicators.fastpath.direct_comparison import CARRIED_BYTES, MAX_RANKS, DirectComparison
from torchmn.communicators.fastpath.host_ring import HostRing
from torchmn.communicators.fastpath.shared_sum import SharedSum
from torchmn.communicators.fastpath.slots import SLOT_BYTES, STEP_BYTES, Slots
from torchmn.communicators.messages import reductions, staging
from torchmn.communicators.messages.wire import Header, Message
from torchmn.communicators.transports.group import Group
from torchmn.communicators.transports.mpi import DroppedTransports, MPITransport
from torchmn.communicators.transports.transport import Pending

_MIN_SLOT_BYTES = 64 << 10  # smaller messages are one MPI message
_IN_SLOTS = 1 << 40  # `Header.number` from here on is the number of a slot


class HostTransport(MPITransport):
    """`MPITransport` with five fast paths. All ranks choose the same one, because they choose by size.

    - A message of 64 KB to 4 MB to a rank of this host is in a slot of shared memory; MPI sends only its header.
    - Up to four ranks compare numbers directly, each with each.
    - A small tensor piggybacks on the number (see `Carrier`).
    - Ranks of one host sum large tensors in shared memory.
    - Several hosts reduce large tensors in a ring.
    """

    def __init__(self, group: Group, point_to_point: MPI.Comm, slots: Slots, dropped: DroppedTransports | None = None):
        super().__init__(group, point_to_point, dropped)
        self._slots = slots
        self._filled: list[_FilledSlot] = []
        self._filling = Lock()  # several threads may send at once
        self._comparison = DirectComparison(self.collective) if 1 < group.size <= MAX_RANKS else None
        self._hosts = len(set(group.hosts))
        self._sum: SharedSum | None = None  # created by the first sum that is large enough
        self._ring: HostRing | None = None  # the same
        if self._comparison is not None:
            self.carrier = self

    @staticmethod
    def of_world(group: Group, point_to_point: MPI.Comm) -> HostTransport:
        """Returns the transport of all ranks that were started together."""
        return HostTransport(group, point_to_point, Slots(point_to_point, group.hosts))

    def like(self, group: Group, point_to_point: MPI.Comm) -> HostTransport:
        return HostTransport(group, point_to_point, self._slots, self.dropped)

    # -- messages in slots -------------------------------------------------------------------------------------

    def post(self, message: Message, dest: int, tag: int) -> Pending | None:
        if len(message.tensors) == 1 and _MIN_SLOT_BYTES < message.tensors[0].nbytes <= SLOT_BYTES:
            slot = None
            if not message.on_gpu and self._slots.reaches(self.group.world_ranks[dest]):
                slot = self._slots.claim()
            if slot is not None:
                self._post_in_slot(message, dest, tag, slot)
                return None
        return super().post(message, dest, tag)

    def _post_in_slot(self, message: Message, dest: int, tag: int, slot: int) -> None:
        x = message.tensors[0]
        header = Header(message.kind, message.request, _IN_SLOTS + slot, message.layout())
        # The first part before the header: a receiver that finds an empty slot would yield its core.
        first = min(STEP_BYTES, x.nbytes)
        self._slots.fill(slot, x.data_ptr(), first)
        self.post_bytes(header.encode(), dest, tag)
        self._slots.fill(slot, x.data_ptr(), x.nbytes, first)
        with self._filling:
            self._filled = [each for each in self._filled if not each.is_received()]
            self._filled.append(_FilledSlot(dest, tag, self._slots, slot))

    def take_announced(self, header: Header, source: int) -> Message:
        if header.number < _IN_SLOTS:
            return super().take_announced(header, source)
        x = header.layout.specs[0].empty()
        self._slots.copy_out(self.group.world_ranks[source], header.number - _IN_SLOTS, x)
        return header.message((x,))

    def undelivered(self) -> list[int]:
        return super().undelivered() + [each.dest for each in self._filled if not each.is_received()]

    def flush(self) -> Iterator[Pending]:
        yield from super().flush()
        yield from self._filled

    # -- comparisons, and tensors that piggyback on them -------------------------------------------------------

    def equal(self, number: int) -> bool:
        return super().equal(number) if self._comparison is None else self._comparison.equal(number, None)

    def payload(self, x: Tensor) -> Tensor | None:
        """See `Carrier`."""
        # Two ranks that already share stages use them for larger payloads; more ranks divide the work of such a sum.
        in_stages = self._sum is not None and self._sum.works and self.group.size == 2
        limit = min(shared_sum.CHUNK_BYTES if in_stages else CARRIED_BYTES, self.group.settings.max_message_bytes)
        if not 0 < x.nbytes <= limit or x.dtype not in reductions.REDUCED_BY_TORCH:
            return None
        return staging.plain_memory(x, on_host=True)

    def equal_carrying(self, number: int, payload: Tensor) -> list[Tensor] | None:
        """See `Carrier`."""
        comparison = self._comparison
        assert comparison is not None
        if payload.nbytes <= CARRIED_BYTES:
            return comparison.parts(payload) if comparison.equal(number, payload) else None
        assert self._sum is not None
        self._sum.write(payload)
        if not comparison.equal(number, None):
            return None
        parts = list(self._sum.read(payload))
        parts[self.group.rank] = payload  # the same values, in this core's cache
        return parts

    # -- sums --------------------------------------------------------------------------------------------------

    def allreduce_(self, source: Tensor, out: Tensor, op: str, scale: float) -> bool:
        if (
            self._hosts == 1 < self.group.size
            and op == "sum"
            and out.is_cpu
            and shared_sum.is_faster(out, self.group.size)
        ):
            if self._sum is None:
                self._sum = SharedSum(self.collective)
            if self._sum.works:
                self._sum.sum_(source.view(-1), out.view(-1), scale)
                return True
        return super().allreduce_(source, out, op, scale)

    def reduce_(self, source: Tensor, out: Tensor, datatype: MPI.Datatype, op: MPI.Op) -> None:
        if not host_ring.is_faster(out, self._hosts):
            super().reduce_(source, out, datatype, op)
            return
        if self._ring is None:
            self._ring = HostRing(self.collective, self.group.hosts)
            self.comms += self._ring.comms
        self._ring.reduce_(source, out, datatype, op)


@dataclass
class _FilledSlot:
    """A message to `dest` in a slot."""

    dest: int
    tag: int | None
    slots: Slots
    slot: int

    def is_received(self) -> bool:
        return self.slots.is_delivered(self.slot)

    def wait(self) -> None:
        while not self.is_received():
            sleep(1e-3)
