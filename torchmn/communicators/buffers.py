"""Whole buffers on top of a transport: staged, in pieces, in the right dtype, with or without a header.

Nothing is checked here: ranks have agreed on what they do before.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchmn.communicators.messages import plain_values, reductions, staging, wire
from torchmn.communicators.messages.wire import Kind
from torchmn.communicators.transports.transport import Exchange, Transport
from torchmn.communicators.watchdog.waits import Wait

BLOCK_BYTES = 2048
"""A broadcast's first message: header, and the payload too where it fits."""


class Buffers:
    """The moves that the operations of a communicator are made of.

    Attributes:
        outgoing: returns a tensor detached and contiguous, in memory that the transport can read; the tensor itself
            where it is that already.
    """

    def __init__(self, transport: Transport):
        group = transport.group
        self.transport = transport
        self.rank = group.rank
        self.size = group.size
        self.settings = group.settings
        self._others = [peer for peer in range(group.size) if peer != group.rank]
        self._reads_gpu_memory = transport.traits.reads_gpu_memory
        self.outgoing = partial(staging.plain_memory, on_host=not self._reads_gpu_memory)
        self._block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        self._block_view = self._block.numpy().data

    def room(self, shape: Sequence[int], like: Tensor | wire.TensorSpec) -> Tensor:
        """Room to receive a tensor of `shape` with the dtype of `like`."""
        on_gpu = like.on_gpu if isinstance(like, wire.TensorSpec) else like.is_cuda
        if on_gpu and self._reads_gpu_memory:
            return torch.empty(tuple(shape), dtype=like.dtype, device=self.settings.device)
        return torch.empty(tuple(shape), dtype=like.dtype, device="cpu")

    def arrived(self, received: Tensor, like: Tensor) -> Tensor:
        return received.to(like.device) if like.is_cuda else received

    def placed(self, message: wire.Message) -> wire.Message:
        """A message whose tensors lie where their sender's did: on this rank's GPU, or on the host."""
        placed = zip(message.tensors, message.on_gpu, strict=True)
        message.tensors = tuple(x.to(self.settings.device) if gpu else x for x, gpu in placed)
        return message

    def reduce(self, x: Tensor, op: str, in_place: bool) -> Tensor:
        """The agreed reduction of `x` over all ranks."""
        dtype = x.dtype
        wide = reductions.ACCUMULATORS[dtype]
        source = self.outgoing(x)
        if dtype != wide:
            source = total = source.to(wide)
        elif source.data_ptr() != x.data_ptr() or in_place:
            total = source
        else:
            total = torch.empty_like(source)
        operation = reductions.accumulating_operation(dtype, op)
        self._reduce_(source, total, operation, 1 / self.size if op == "mean" else 1.0)
        if not in_place:
            return self.arrived(total if dtype == wide else total.to(dtype), x)
        if total.data_ptr() != x.data_ptr():
            x.detach().copy_(total)
        else:
            increment_version(x)  # a transport writes to memory, and autograd must learn that a graph's value is gone
        return x

    def _reduce_(self, source: Tensor, out: Tensor, op: str, scale: float) -> None:
        """Reduces contiguous `source` into `out`, which may be the same, and scales it."""
        limit = self.settings.max_message_bytes
        if 0 < out.nbytes <= limit and self.transport.allreduce_(source, out, op, scale):
            return
        if source is not out:
            out.copy_(source)
        for piece in wire.pieces(out.view(-1), limit):
            if not self.transport.allreduce_(piece, piece, op, scale):
                parts = self.allgather_whole(piece, [piece.numel()] * self.size).view(self.size, -1)
                piece.copy_(reductions.reduce_in_order(list(parts.unbind()), op))
                reductions.scale_(piece, scale)

    def bcast_tensor(self, x: Tensor | None, on_gpu: bool, root: int, into: Tensor | None = None) -> Tensor:
        """The contiguous tensor of `root`: one message where header and payload fit a block, else two.

        into: a tensor like it that may be overwritten; what is returned is this one, if the transport can write there.
        Its version counter is raised.
        """
        if x is not None:
            layout = wire.Layout.of((wire.TensorSpec(x.dtype, x.shape, on_gpu),))
            data = wire.Header(Kind.TENSOR, 0, 0, layout).encode()
            inline = x.nbytes <= BLOCK_BYTES - 8 - len(data) and not x.is_cuda
            self.bcast_bytes(data + wire.read_memory(x) if inline else data, root)
            if not inline:
                self._bcast_flat(x.view(-1), root)
            return x
        data = self.bcast_bytes(None, root)
        header, start = wire.Header.decode(data)
        spec, nbytes = header.layout.specs[0], header.layout.nbytes
        if len(data) == start + nbytes:
            received = wire.tensor_in(data, start, nbytes, spec)
        else:
            received = self.room(spec.shape, spec) if into is None or spec.on_gpu or not _is_plain(into) else into
            self._bcast_flat(received.view(-1), root)
            if received is into:
                increment_version(received)
        return received.to(self.settings.device) if spec.on_gpu else received

    def bcast_bytes(self, data: Any, root: int) -> bytes:
        """The bytes of `root`, on every rank: in one block if they fit, else in two broadcasts."""
        block = self._block_view
        if self.rank == root:
            length = len(data)
            struct.pack_into("<q", block, 0, length)
            if length <= BLOCK_BYTES - 8:
                block[8 : 8 + length] = data if isinstance(data, bytes) else wire.to_bytes(data)
        self.transport.bcast_(self._block, root)
        (length,) = struct.unpack_from("<q", block)
        if length <= BLOCK_BYTES - 8:
            return bytes(block[8 : 8 + length])
        rest = wire.from_buffer(data) if self.rank == root else wire.room(length)
        self._bcast_flat(rest, root)
        return data if self.rank == root else wire.to_bytes(rest)

    def _bcast_flat(self, flat: Tensor, root: int) -> None:
        for piece in wire.pieces(flat, self.settings.max_message_bytes):
            self.transport.bcast_(piece, root)

    def allgather_whole(self, flat: Tensor, counts: Sequence[int]) -> Tensor:
        """All ranks' flat buffers, of `counts[rank]` elements, one behind the other."""
        whole = torch.empty(sum(counts), dtype=flat.dtype, device=flat.device)
        if whole.nbytes <= self.settings.max_message_bytes:
            self.transport.allgather_(flat, whole, counts)
            return whole
        parts = whole.split(list(counts))
        parts[self.rank].copy_(flat)
        self.exchange(dict.fromkeys(self._others, flat), {peer: parts[peer] for peer in self._others})
        return whole

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        counts = self.allgather_counts(len(data))
        whole = wire.to_bytes(self.allgather_whole(wire.from_bytes(data), counts))
        ends = list(accumulate(counts))
        return [whole[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def allgather_plain(self, value: Any) -> list[Any]:
        """Every rank's plain value, in rank order; with no check before: the path that the checks themselves use."""
        return [plain_values.decode(data) for data in self.allgather_bytes(plain_values.encode(value))]

    def allgather_counts(self, count: int) -> list[int]:
        """Every rank's number, in rank order."""
        counts = self.allgather_whole(torch.tensor([count], device="cpu"), [1] * self.size)
        return counts.tolist()

    def swap(self, xs: Sequence[Tensor] | Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Give every rank its element of `xs`, and get one of `shapes[peer]` from each."""
        incoming = {peer: self.room(shapes[peer], xs[peer]) for peer in self._others}
        self.start_exchange({peer: self.outgoing(xs[peer]) for peer in self._others}, incoming).wait()
        mine = xs[self.rank].detach().clone()
        if mine.is_cuda:
            incoming = {peer: self.arrived(x, mine) for peer, x in incoming.items()}
        incoming[self.rank] = mine
        return tuple([incoming[peer] for peer in range(self.size)])

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Swaps contiguous buffers with peers."""
        self.start_exchange(outgoing, incoming).wait()

    def start_exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Exchange:
        """Starts what `exchange` does; no buffer may be touched until the exchange has been waited for."""
        out: dict[int, Tensor] = {}
        into: dict[int, Tensor] = {}
        largest = 0
        for given, flat in ((outgoing, out), (incoming, into)):
            for peer, x in given.items():
                if x.numel():
                    flat[peer] = x.view(-1)
                    largest = max(largest, x.nbytes)
        if largest <= self.settings.max_message_bytes:
            return self.transport.exchange(out, into)
        return _All([self.transport.exchange(*each) for each in self._rounds(out, into)])

    def _rounds(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
    ) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
        """What goes out and what comes in, round by round, each message no larger than the limit.

        Each pair of ranks has as many rounds as its buffer needs.
        """
        limit = self.settings.max_message_bytes
        out = {peer: list(wire.pieces(x, limit)) for peer, x in outgoing.items()}
        into = {peer: list(wire.pieces(x, limit)) for peer, x in incoming.items()}
        for turn in range(max(len(parts) for parts in (*out.values(), *into.values()))):
            yield (
                {peer: parts[turn] for peer, parts in out.items() if turn < len(parts)},
                {peer: parts[turn] for peer, parts in into.items() if turn < len(parts)},
            )


class _All:
    """Several exchanges as one."""

    def __init__(self, exchanges: list[Exchange]):
        self._exchanges = exchanges

    def wait(self) -> None:
        for exchange in self._exchanges:
            exchange.wait()

    def wait_received(self) -> None:
        for exchange in self._exchanges:
            exchange.wait_received()


def _is_plain(x: Tensor) -> bool:
    """Whether the numbers of `x` are what its memory on the host holds, one behind the other."""
    return x.is_cpu and x.is_contiguous() and not x.is_conj() and not x.is_neg()


class StartedExchange:
    """Buffers on their way, and the room for those that come in; the watchdog sees whoever waits for them."""

    def __init__(
        self,
        buffers: Buffers,
        operation: str,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, int],
        like: Tensor,
    ):
        self._buffers, self._operation, self._like = buffers, operation, like
        device = like.device if buffers.transport.traits.reads_gpu_memory else "cpu"
        self._rooms = {peer: torch.empty(nbytes, dtype=torch.uint8, device=device) for peer, nbytes in incoming.items()}
        if like.is_cuda:
            outgoing = {peer: buffers.outgoing(x) for peer, x in outgoing.items()}
        with Wait(buffers.transport.group, operation):
            self._exchange = buffers.start_exchange(outgoing, self._rooms)

    def received(self) -> dict[int, Tensor]:
        """Waits for the buffers of other ranks and returns them by peer; what was sent may still be read."""
        peer = next(iter(self._rooms)) if len(self._rooms) == 1 else None
        with Wait(self._buffers.transport.group, self._operation, peer):
            self._exchange.wait_received()
        if not self._like.is_cuda:
            return self._rooms
        return {peer: room.to(self._like.device) for peer, room in self._rooms.items()}
