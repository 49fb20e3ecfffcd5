"""The MPI transport: mpi4py on MPICH, Open MPI, Intel MPI, ...

A small message is one MPI message: header and payload together, received into a buffer that is always large enough. The
payload of a larger one follows its header and is received into the tensors themselves. `post` must not wait, and its
caller may change the tensor afterwards. So a payload is copied, unless it is large and the receiver, already waiting,
replies to the header at once with an empty "ready" message.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from torchmn.communicators.messages import plain_values, reductions, wire
from torchmn.communicators.messages.wire import Header, Kind, Layout, Message, TensorSpec
from torchmn.communicators.transports.group import Group
from torchmn.communicators.transports.mpi_library import reads_gpu_memory
from torchmn.communicators.transports.transport import Carrier, Exchange, PeerBuffers, Pending, Traits

INLINE_BYTES = 68 << 10  # 64 KB and its header
_COPIED_BYTES = 512 << 10  # up to this size a copy is cheaper than a "ready" message
_COPY_BYTES_PER_SECOND = 10e9  # bounds the wait for a "ready" message to about the time of the copy
_MIN_HELD = 16  # sends that are kept before the first test whether they are complete
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


def memory(x: Tensor) -> Any:
    """Returns the memory of a contiguous tensor, for MPI to read or write."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()  # MPI does not wait for CUDA streams
    return MPI.memory.fromaddress(x.data_ptr(), x.nbytes)


def allgather_plain(comm: MPI.Comm, value: Any) -> list[Any]:
    """Returns every rank's plain value, in rank order. mpi4py's `allgather` would pickle it."""
    data = plain_values.encode(value)
    counts = array("q", [0] * comm.size)
    comm.Allgather([array("q", [len(data)]), MPI.INT64_T], [counts, MPI.INT64_T])
    whole = bytearray(sum(counts))
    comm.Allgatherv([data, MPI.BYTE], [whole, list(counts), MPI.BYTE])
    starts = [sum(counts[:rank]) for rank in range(comm.size)]
    return [plain_values.decode(bytes(whole[start : start + n])) for start, n in zip(starts, counts, strict=True)]


class _Dropped(NamedTuple):
    """What a transport that was dropped without `close` leaves behind."""

    name: str
    world_ranks: tuple[int, ...]
    comms: list[MPI.Comm]
    held: list[_PendingSend]  # MPI may still read their buffers


class DroppedTransports:
    """MPI's communicators of transports that this rank has dropped, until every rank of them has.

    MPI has about 2,000 communicators at a time. To free one is a collective operation, and Python collects garbage at
    another moment on each rank: so ranks free them together in their next `split`.
    """

    def __init__(self) -> None:
        self._new: deque[_Dropped] = deque()  # a collection of garbage, in any thread, may append at any time
        self._waiting: dict[str, _Dropped] = {}

    def watch(self, transport: MPITransport) -> weakref.finalize:
        """Returns the finalizer that records the communicators of `transport` when it is dropped."""
        group = transport.group
        left = _Dropped(group.name, group.world_ranks, transport.comms, transport.held)
        finalizer = weakref.finalize(transport, self._new.append, left)
        finalizer.atexit = False
        return finalizer

    def free(self, comm: MPI.Comm, group: Group) -> None:
        """Frees what all of its ranks have dropped. All ranks of `group`, which are those of `comm`, must call."""
        while self._new:
            dropped = self._new.popleft()
            self._waiting[dropped.name] = dropped
        members = set(group.world_ranks)
        mine = sorted(name for name, dropped in self._waiting.items() if members.issuperset(dropped.world_ranks))
        count = Counter(name for names in allgather_plain(comm, mine) for name in names)
        for name in mine:  # in the same order on all ranks
            if count[name] == len(self._waiting[name].world_ranks):
                for each in self._waiting.pop(name).comms:
                    each.Free()


@dataclass
class _PendingSend:
    """A send in flight, with its buffers, which must live until it is complete."""

    dest: int
    tag: int | None  # None in an exchange
    requests: list[MPI.Request]
    buffers: Any

    def is_complete(self) -> bool:
        return self.requests[0].Test() if len(self.requests) == 1 else MPI.Request.Testall(self.requests)

    def wait(self) -> None:
        MPI.Request.Waitall(self.requests)


@dataclass
class _Exchange:
    """An exchange in flight, with the buffers that it reads and writes."""

    transport: MPITransport
    receives: list[MPI.Request]
    sends: list[MPI.Request]
    outgoing: PeerBuffers
    incoming: PeerBuffers

    def wait(self) -> None:
        MPI.Request.Waitall(self.receives + self.sends)

    def wait_received(self) -> None:
        MPI.Request.Waitall(self.receives)
        for (peer, x), send in zip(self.outgoing.items(), self.sends, strict=True):
            self.transport.hold(_PendingSend(peer, None, [send], x))


class _ReceiveBuffer:
    """A buffer that is large enough for the first part of every message."""

    __slots__ = ("data", "spec")

    def __init__(self) -> None:
        self.data = bytearray(INLINE_BYTES)
        self.spec = [self.data, MPI.BYTE]


class MPITransport:
    """One rank's connections to the other ranks of its group, which an MPI launcher started.

    Attributes:
        p2p, collective: two communicators of MPI, so that messages of users and of collective operations do not match.
        comms: all communicators of MPI that end with this transport.
        held: sends whose buffers must live until they are complete, and some that are complete.
        outside: MPI's communicator of the same ranks for the user's own calls of MPI; None for a subgroup until
            `for_users` creates it.
    """

    def __init__(self, group: Group, point_to_point: MPI.Comm, dropped: DroppedTransports | None = None):
        self.group = group
        self.p2p = point_to_point
        self.collective = point_to_point.Dup()
        self.comms = [self.p2p, self.collective]
        self.outside: MPI.Comm | None = None
        # A third of the tags each for users' messages, payloads that follow a header, and "ready" messages.
        self._third = ((MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1) // 3
        self.traits = Traits("mpi", tag_limit=self._third, reads_gpu_memory=reads_gpu_memory())
        self.carrier: Carrier | None = None
        # Several threads may send and receive at once: `count` gives no number twice, and one at a time shortens
        # `held`.
        self._numbers = [count(1) for _ in range(group.size)]
        self.held: list[_PendingSend] = []
        self._most_held = _MIN_HELD
        self._releasing = Lock()
        self.dropped = dropped or DroppedTransports()
        self._finalizer = self.dropped.watch(self)
        self._receive_buffers: list[_ReceiveBuffer] = []
        self._empty = [bytearray(1), 0, MPI.BYTE]
        self._compared = array("q", (0, 0))

    # -- messages ----------------------------------------------------------------------------------------------

    def post(self, message: Message, dest: int, tag: int) -> Pending | None:
        header = Header(message.kind, message.request, 0, message.layout())
        encoded = header.encode()
        if len(encoded) + header.layout.nbytes <= INLINE_BYTES and not message.on_gpu:
            self.post_bytes(b"".join([encoded, *[memory(x) for x in message.tensors]]), dest, tag)
            return None
        return self._post_large(message, header, dest, tag)

    def post_bytes(self, data: bytes, dest: int, tag: int) -> None:
        """Sends a header and the payload that follows it, at most INLINE_BYTES."""
        self.hold(_PendingSend(dest, tag, [self.p2p.Isend([data, MPI.BYTE], dest, tag)], data))

    def _post_large(self, message: Message, header: Header, dest: int, tag: int) -> Pending | None:
        number = next(self._numbers[dest]) % (self._third - 1) + 1
        tensors, nbytes = list(message.tensors), header.layout.nbytes
        asks_ready = not message.private and nbytes > _COPIED_BYTES
        if not message.private and not asks_ready:
            tensors = [x.clone() for x in tensors]
        # A negative number requests a "ready" message.
        encoded = Header(header.kind, header.request, -number if asks_ready else number, header.layout).encode()
        first, long = encoded, []
        if len(encoded) > INLINE_BYTES:  # thousands of tensors: the header follows, before them
            length = Layout.of((TensorSpec(torch.uint8, (len(encoded),)),))
            first = Header(Kind.LONG, header.request, number, length).encode()
            long = [wire.from_bytes(encoded)]
        ready = self.p2p.Irecv(self._empty, dest, 2 * self._third + number) if asks_ready else None
        requests = [self.p2p.Isend([first, MPI.BYTE], dest, tag), *self._isend(long, dest, number)]
        if ready is not None:
            if _becomes_ready(ready, nbytes):
                requests += self._isend(tensors, dest, number)
                return _PendingSend(dest, tag, requests, (first, long, tensors))
            tensors = [x.clone() for x in tensors]
            requests.append(ready)
        self.hold(_PendingSend(dest, tag, requests + self._isend(tensors, dest, number), (first, long, tensors)))
        return None

    def _isend(self, tensors: Sequence[Tensor], dest: int, number: int) -> list[MPI.Request]:
        tag = self._third + number
        return [self.p2p.Isend([memory(piece), MPI.BYTE], dest, tag) for piece in self._pieces(tensors)]

    def _irecv(self, tensors: Sequence[Tensor], source: int, number: int) -> list[MPI.Request]:
        tag = self._third + number
        return [self.p2p.Irecv([memory(piece), MPI.BYTE], source, tag) for piece in self._pieces(tensors)]

    def _pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        limit = self.group.settings.max_message_bytes
        return [piece for x in tensors for piece in wire.pieces(x.view(-1), limit)]

    def hold(self, send: _PendingSend) -> None:
        """Keeps the buffers of a send until it is complete, and releases those of complete ones."""
        if len(self.held) >= self._most_held:
            self._release_complete()
            # So that a send tests two others on average, however many are held.
            self._most_held = max(_MIN_HELD, 2 * len(self.held))
        if not send.is_complete():
            self.held.append(send)

    def _release_complete(self) -> None:
        if self._releasing.acquire(blocking=False):  # else another thread does it: only one may test a request
            try:
                held = self.held[:]
                # In place: other threads append to this list meanwhile.
                self.held[: len(held)] = [send for send in held if not send.is_complete()]
            finally:
                self._releasing.release()

    def take(self, source: int, tag: int) -> Message:
        try:
            buffer = self._receive_buffers.pop()
        except IndexError:  # other threads use them
            buffer = _ReceiveBuffer()
        self.p2p.Recv(buffer.spec, source, tag)
        header, start = Header.decode(buffer.data)
        if header.number == 0:
            message = header.message_in(buffer.data, start)
            self._receive_buffers.append(buffer)
            return message
        self._receive_buffers.append(buffer)
        return self.take_announced(header, source)

    def take_announced(self, header: Header, source: int) -> Message:
        """Receives the tensors of a message whose header arrived without them."""
        number = abs(header.number)
        if header.kind == Kind.LONG:
            long = header.layout.specs[0].empty()
            MPI.Request.Waitall(self._irecv([long], source, number))
            header, _ = Header.decode(wire.to_bytes(long))
        if header.number < 0:
            # Before the receives are posted, because the sender polls for it; MPI buffers a payload that arrives early.
            self.p2p.Send(self._empty, source, 2 * self._third + number)
        gpu = self.group.settings.device if self.traits.reads_gpu_memory else None
        tensors = [spec.empty(gpu) for spec in header.layout.specs]
        MPI.Request.Waitall(self._irecv(tensors, source, number))
        return header.message(tensors)

    def arrived(self, source: int, tag: int) -> bool:
        return self.p2p.Iprobe(source, tag)

    def undelivered(self) -> list[int]:
        self._release_complete()
        return [send.dest for send in self.held]

    def flush(self) -> Iterator[Pending]:
        with self._releasing:
            yield from self.held
            self.held.clear()

    # -- collective operations ---------------------------------------------------------------------------------

    def exchange(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Exchange:
        receives = [self.collective.Irecv([memory(x), MPI.BYTE], peer) for peer, x in incoming.items()]
        sends = [self.collective.Isend([memory(x), MPI.BYTE], peer) for peer, x in outgoing.items()]
        return _Exchange(self, receives, sends, outgoing, incoming)

    def equal(self, number: int) -> bool:
        # max(n) == min(n) in one reduction: the minimum is the negated maximum of the negated numbers.
        numbers = self._compared
        numbers[0], numbers[1] = number, -number
        self.collective.Allreduce(MPI.IN_PLACE, [numbers, 2, MPI.INT64_T], MPI.MAX)
        return numbers[0] == -numbers[1]

    def bcast_(self, flat: Tensor, root: int) -> None:
        self.collective.Bcast([memory(flat), MPI.BYTE], root)

    def allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        if len(set(counts)) == 1:
            self.collective.Allgather([memory(flat), MPI.BYTE], [memory(whole), MPI.BYTE])
        else:
            sizes = [n * flat.element_size() for n in counts]
            self.collective.Allgatherv([memory(flat), MPI.BYTE], [memory(whole), sizes, MPI.BYTE])

    def allreduce_(self, source: Tensor, out: Tensor, op: str, scale: float) -> bool:
        datatype = _DATATYPES.get(out.dtype)
        if datatype is None or reductions.may_lose_nan(out.dtype, op):
            return False
        self.reduce_(source, out, datatype, _OPERATIONS[op])
        reductions.scale_(out, scale)
        return True

    def reduce_(self, source: Tensor, out: Tensor, datatype: MPI.Datatype, op: MPI.Op) -> None:
        """Reduces `source` over ranks into `out`, which may be the same, with one of MPI's operations."""
        given = MPI.IN_PLACE if source is out else [memory(source), datatype]
        self.collective.Allreduce(given, [memory(out), datatype], op)

    def subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> MPITransport | None:
        self.dropped.free(self.collective, self.group)
        if color is None:
            self.collective.Split(MPI.UNDEFINED, 0)
            return None
        members = members_of[color]
        # MPI's colors cannot be negative; ours may be any int.
        split = self.collective.Split(sorted(members_of).index(color), members.index(self.group.rank))
        return self.like(self.group.among(members, name), split)

    def like(self, group: Group, point_to_point: MPI.Comm) -> MPITransport:
        """Returns a transport of this kind for another group of ranks of the same job."""
        return MPITransport(group, point_to_point, self.dropped)

    def for_users(self) -> MPI.Comm:
        """Returns MPI's communicator of these ranks for the user's own calls; all must call it, the first time."""
        if self.outside is None:
            self.outside = self.collective.Dup()
        return self.outside

    def close(self) -> None:
        self._finalizer.detach()
        if not MPI.Is_finalized():
            for comm in self.comms:
                comm.Free()


def _becomes_ready(ready: MPI.Request, nbytes: int) -> bool:
    deadline = perf_counter() + 100e-6 + nbytes / _COPY_BYTES_PER_SECOND
    while not ready.Test():
        if perf_counter() > deadline:
            return False
    return True


def end_job(status: int) -> None:
    """Ends every process of the MPI job."""
    MPI.COMM_WORLD.Abort(status)
