"""Messages between two ranks by MPI: how `send` and `recv` travel.

A small message is one MPI message: header and payload together, received into a buffer that is always large
enough. A larger payload follows its header, straight into the receiver's tensors. `send` must not wait, and its
caller may change the tensor at once: so a payload is copied, best of all into memory that the receiver shares, unless
it is large and the receiver says at once, with an empty "ready" message, that it is waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from threading import Lock
from time import perf_counter, sleep
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.autograd import forward_ad

from torchmn.communicators import wire
from torchmn.communicators.base import Communicator
from torchmn.communicators.outbox import FILLS_WHILE_READ, SLOT_BYTES, Outbox
from torchmn.communicators.settings import Settings
from torchmn.communicators.topology import Place
from torchmn.communicators.watchdog import Wait
from torchmn.communicators.wire import Header, Kind, Layout, Message, TensorSpec

INLINE_BYTES = 68 << 10  # 64 KB and its header
_QUICK_BYTES = 64 << 10
_COPIED_BYTES = 512 << 10  # up to this a copy is cheaper than asking whether the receiver is ready
_IN_OUTBOX = 1 << 40  # larger than any tag: the payload lies in the sender's outbox, in the slot above this number
_pack_edge = wire.EDGE.pack
_fromaddress, _BYTE, _STRIDED = MPI.memory.fromaddress, MPI.BYTE, torch.strided  # looked up once, not per message
_COPY_BYTES_PER_SECOND = 10e9  # how long to look for a "ready": about as long as the copy would take


def memory(x: Tensor) -> Any:
    """The memory of a contiguous tensor, for MPI to read or write."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()  # MPI knows nothing of streams
    return MPI.memory.fromaddress(x.data_ptr(), x.nbytes)


@lru_cache(maxsize=4096)
def _layout_of(dtype: torch.dtype, shape: torch.Size, wants_gradient: bool) -> Layout | None:
    """The layout of one tensor; None for a dtype that can not travel."""
    if dtype not in wire.DTYPE_CODES:
        return None
    return Layout.of((TensorSpec(dtype, shape, wants_gradient=wants_gradient),))


@dataclass
class _Undelivered:
    """A send that has not ended: its buffers must live until it has."""

    dest: int
    tag: int | None  # None in an exchange
    requests: list[MPI.Request]
    buffers: Any
    slot: int | None = None  # of the outbox


class _Inbox:
    """A buffer that the first part of every message fits into."""

    __slots__ = ("buffer", "data", "view")

    def __init__(self) -> None:
        self.data = bytearray(INLINE_BYTES)
        self.view = memoryview(self.data)
        self.buffer = [self.data, MPI.BYTE]


class MPIMessages(Communicator):
    """The part of the MPI transport that sends from one rank to another."""

    def __init__(self, place: Place, settings: Settings, point_to_point: MPI.Comm, outbox: Outbox):
        super().__init__(place, settings)
        self._p2p = point_to_point
        # A third of the tags each: the users', payloads that follow a header, "ready" messages.
        self.tag_limit = ((MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1) // 3
        self._outbox = outbox
        # Several threads may send and receive at once: no number is given twice, and one of them cuts `_pending`.
        self._sent = [count(1) for _ in range(self.size)]
        self._pending: list[_Undelivered] = []
        self._releasing = Lock()
        self._inboxes: list[_Inbox] = []
        self._nothing = [bytearray(1), 0, MPI.BYTE]

    def _send_at_once(self, x: Tensor, dest: int, tag: int, number: int = 0, wants_gradient: bool = False) -> bool:
        """Send one contiguous tensor of the host, the common case, in as few steps as Python allows.

        False, and nothing is sent, if it is not that: then `_post` does it.
        """
        try:
            if x.layout is not _STRIDED or not (x.is_cpu and x.is_contiguous()) or x.is_conj() or x.is_neg():
                return False
            layout, address = _layout_of(x.dtype, x.shape, wants_gradient), x.data_ptr()
        except (RuntimeError, ValueError):  # it has no shape or no memory: the checks of the long way find the words
            return False
        if layout is None or layout.nbytes > self.settings.max_message_bytes:
            return False
        nbytes = layout.nbytes
        if (nbytes and not address) or forward_ad._current_level >= 0:
            return False
        if nbytes > _QUICK_BYTES:
            if self._send_by_outbox(x, layout, dest, tag, number):
                return True
            self._release_delivered()
            follows = self._next_number(dest)
            header = Header(Kind.TENSOR, number, -follows, layout).encode()
            self._send_asking(x, nbytes, header, dest, tag, follows)
            return True
        header = _pack_edge(number) + layout.alike
        data: Any = header + _fromaddress(address, nbytes) if nbytes else header  # type: ignore[operator]
        request = self._p2p.Isend([data, _BYTE], dest, tag)
        if self._pending:  # only now: the receiver may be waiting
            self._release_delivered()
        if not request.Test():
            self._hold(_Undelivered(dest, tag, [request], data))
        return True

    def _send_by_outbox(self, x: Tensor, layout: Layout, dest: int, tag: int, edge: int) -> bool:
        """Send through this host's shared memory; False if the receiver is elsewhere or there is no free slot."""
        nbytes = layout.nbytes
        if nbytes > SLOT_BYTES or not self._outbox.reaches(self._world_ranks[dest]):
            return False
        slot = self._outbox.claim()
        if slot is None:
            return False
        header = Header(Kind.TENSOR, edge, _IN_OUTBOX + slot, layout).encode()
        if FILLS_WHILE_READ:
            request = self._p2p.Isend([header, MPI.BYTE], dest, tag)
            self._outbox.fill(slot, x.data_ptr(), nbytes)
        else:
            self._outbox.fill(slot, x.data_ptr(), nbytes)
            request = self._p2p.Isend([header, MPI.BYTE], dest, tag)
        request.Test()
        self._release_delivered()
        self._hold(_Undelivered(dest, tag, [request], header, slot))
        return True

    def _send_asking(self, x: Tensor, nbytes: int, header: bytes, dest: int, tag: int, number: int) -> None:
        """Send the header; then `x` as it lies if the receiver is ready for it, else a copy."""
        ready = self._p2p.Irecv(self._nothing, dest, 2 * self.tag_limit + number)
        requests = [self._p2p.Isend([header, MPI.BYTE], dest, tag)]
        if self._becomes_ready(ready, nbytes):
            with Wait(self, "send", dest, tag):
                self._p2p.Send([memory(x), MPI.BYTE], dest, self.tag_limit + number)
                requests[0].Wait()
            return
        copy = x.detach().clone()
        requests += [ready, self._p2p.Isend([memory(copy), MPI.BYTE], dest, self.tag_limit + number)]
        self._keep(dest, tag, requests, (header, copy))

    def _next_number(self, dest: int) -> int:
        return next(self._sent[dest]) % (self.tag_limit - 1) + 1

    def _post(self, message: Message, dest: int, tag: int) -> None:
        if self._pending:
            self._release_delivered()
        header = Header(message.kind, message.edge, 0, message.layout())
        encoded = header.encode()
        if len(encoded) + header.layout.nbytes <= INLINE_BYTES and not message.on_gpu:
            data = b"".join([encoded, *[wire.read_memory(x) for x in message.tensors]])
            self._keep(dest, tag, [self._p2p.Isend([data, MPI.BYTE], dest, tag)], data)
        else:
            self._post_large(message, header, dest, tag)

    def _post_large(self, message: Message, header: Header, dest: int, tag: int) -> None:
        number = self._next_number(dest)
        tensors, nbytes = list(message.tensors), header.layout.nbytes
        if not message.private and nbytes <= _COPIED_BYTES:
            tensors = [x.clone() for x in tensors]
            message.private = True
        asks = not message.private
        # A negative number asks the receiver to say when it is ready.
        encoded = Header(header.kind, header.edge, -number if asks else number, header.layout).encode()
        first, long = encoded, []
        if len(encoded) > INLINE_BYTES:  # thousands of tensors: the header itself follows, ahead of them
            length = Layout.of((TensorSpec(torch.uint8, (len(encoded),)),))
            first = Header(Kind.LONG, header.edge, number, length).encode()
            long = [wire.from_bytes(encoded)]
        ready = self._p2p.Irecv(self._nothing, dest, 2 * self.tag_limit + number) if asks else None
        requests = [self._p2p.Isend([first, MPI.BYTE], dest, tag), *self._isend(long, dest, number)]
        if ready is not None and self._becomes_ready(ready, nbytes):
            with Wait(self, "send", dest, tag):
                MPI.Request.Waitall(requests + self._isend(tensors, dest, number))
            return
        if ready is not None:
            tensors = [x.clone() for x in tensors]
            requests.append(ready)
        self._keep(dest, tag, requests + self._isend(tensors, dest, number), (first, long, tensors))

    def _isend(self, tensors: Sequence[Tensor], dest: int, number: int) -> list[MPI.Request]:
        tag = self.tag_limit + number
        return [self._p2p.Isend([memory(piece), MPI.BYTE], dest, tag) for piece in self._pieces(tensors)]

    def _pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        limit = self.settings.max_message_bytes
        return [piece for x in tensors for piece in wire.pieces(x.view(-1), limit)]

    @staticmethod
    def _becomes_ready(ready: MPI.Request, nbytes: int) -> bool:
        deadline = perf_counter() + 100e-6 + nbytes / _COPY_BYTES_PER_SECOND
        while not ready.Test():
            if perf_counter() > deadline:
                return False
        return True

    def _keep(self, dest: int, tag: int | None, requests: list[MPI.Request], buffers: Any) -> None:
        if not MPI.Request.Testall(requests):
            self._hold(_Undelivered(dest, tag, requests, buffers))

    def _hold(self, send: _Undelivered) -> None:
        self._pending.append(send)
        self._watch.pinned.add(self)  # a communicator that its user has dropped must deliver what was sent, too

    def _release_delivered(self) -> None:
        if self._releasing.acquire(blocking=False):  # else another thread does it; MPI may be asked by one at a time
            try:
                seen = self._pending[:]
                # In place: other threads append to this very list meanwhile.
                self._pending[: len(seen)] = [send for send in seen if not self._has_ended(send)]
            finally:
                self._releasing.release()

    def _has_ended(self, send: _Undelivered) -> bool:
        return MPI.Request.Testall(send.requests) and (send.slot is None or self._outbox.is_delivered(send.slot))

    def _free_inbox(self) -> _Inbox:
        try:
            return self._inboxes.pop()
        except IndexError:  # other threads have them
            return _Inbox()

    def _take(self, source: int, tag: int) -> Message:
        inbox = self._free_inbox()
        self._p2p.Recv(inbox.buffer, source, tag)
        return self._message_in(inbox, source)

    def _message_in(self, inbox: _Inbox, source: int) -> Message:
        """The message whose first part is in the inbox, which is given back."""
        header, start = Header.decode(inbox.data)
        number = header.number
        if number == 0:
            message = header.message_in(inbox.data, start)
            self._inboxes.append(inbox)
            return message
        if number < 0 and header.kind != Kind.LONG:
            # First of all, because the sender spins until it hears it; MPI keeps what comes before its room is there.
            self._p2p.Send(self._nothing, source, 2 * self.tag_limit - number)
        self._inboxes.append(inbox)
        if number >= _IN_OUTBOX:
            x = header.layout.specs[0].empty()
            self._outbox.copy_out(self._world_ranks[source], number - _IN_OUTBOX, x)
            return header.message((x,))
        if header.kind == Kind.LONG:
            long = header.layout.specs[0].empty()
            MPI.Request.Waitall(self._irecv([long], source, number))
            header, _ = Header.decode(wire.to_bytes(long))
            if header.number < 0:
                self._p2p.Send(self._nothing, source, 2 * self.tag_limit + number)
        tensors = [self._room(spec.shape, spec) for spec in header.layout.specs]
        MPI.Request.Waitall(self._irecv(tensors, source, abs(number)))
        return header.message(tensors)

    def _has_arrived(self, source: int, tag: int) -> bool:
        return self._p2p.Iprobe(source, tag)

    def _irecv(self, tensors: Sequence[Tensor], source: int, number: int) -> list[MPI.Request]:
        tag = self.tag_limit + number
        return [self._p2p.Irecv([memory(piece), MPI.BYTE], source, tag) for piece in self._pieces(tensors)]

    def _undelivered(self) -> list[int]:
        return [send.dest for send in self._pending]

    def _flush(self) -> None:
        with self._releasing:
            while self._pending:
                send = self._pending[0]
                with Wait(self, "finalize (a message not yet received)", send.dest, send.tag):
                    MPI.Request.Waitall(send.requests)
                    while send.slot is not None and not self._outbox.is_delivered(send.slot):
                        sleep(1e-3)
                self._pending.pop(0)
