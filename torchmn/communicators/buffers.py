"""Whole buffers on top of a transport: staged, in pieces, in the right dtype, with or without a header.

Nothing is checked here: ranks have agreed on what they do before they come.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchmn.communicators import plain, reductions, staging, wire
from torchmn.communicators.transport import Exchange, Transport
from torchmn.communicators.watchdog import Wait
from torchmn.communicators.wire import Kind

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator

BLOCK_BYTES = 2048
"""A broadcast's first message: header, and the payload too where it fits."""


class Buffers(Transport):
    """The moves that the operations of a communicator are made of."""

    _block: Tensor
    _block_view: memoryview

    @property
    def device(self) -> torch.device:
        """Where this rank computes, and where tensors that left a GPU arrive."""
        return self.settings.device

    def _outgoing(self, x: Tensor) -> Tensor:
        """`x` detached and contiguous, in memory that the transport can read; `x` itself where it is that already."""
        if x._is_zerotensor():  # as derivatives may be: zeros without memory
            x = x.detach().clone()
        if x.is_conj() or x.is_neg():  # lazy flags: the memory holds other numbers than the tensor shows
            x = x.detach().resolve_conj().resolve_neg()
        elif x.requires_grad:
            x = x.detach()
        if x.is_cuda and not self.reads_gpu_memory:
            return staging.to_host(x)
        return x if x.is_contiguous() else x.contiguous()

    def _room(self, shape: Sequence[int], like: Tensor | wire.TensorSpec) -> Tensor:
        """Room to receive a tensor of `shape` with the dtype of `like`."""
        on_gpu = like.on_gpu if isinstance(like, wire.TensorSpec) else like.is_cuda
        if on_gpu and self.reads_gpu_memory:
            return torch.empty(tuple(shape), dtype=like.dtype, device=self.device)
        return torch.empty(tuple(shape), dtype=like.dtype, device="cpu")

    def _arrived(self, received: Tensor, like: Tensor) -> Tensor:
        return received.to(like.device) if like.is_cuda else received

    def _placed(self, message: wire.Message) -> wire.Message:
        """A message whose tensors lie where their sender's did: on this rank's GPU, or on the host."""
        if message.on_gpu:
            placed = zip(message.tensors, message.on_gpu, strict=True)
            message.tensors = tuple(x.to(self.device) if gpu else x for x, gpu in placed)
        return message

    def _reduce(self, x: Tensor, op: str, in_place: bool) -> Tensor:
        """The agreed reduction of `x` over all ranks."""
        dtype = x.dtype
        wide = reductions.accumulator(dtype)
        source = self._outgoing(x)
        if dtype != wide:
            source = total = source.to(wide)
        elif source.data_ptr() != x.data_ptr() or in_place:
            total = source
        else:
            total = torch.empty_like(source)
        operation = reductions.accumulating_operation(dtype, op)
        self._reduce_(source, total, operation, 1 / self.size if op == "mean" else 1.0)
        if not in_place:
            return self._arrived(total if dtype == wide else total.to(dtype), x)
        if total.data_ptr() != x.data_ptr():
            x.detach().copy_(total)
        else:
            increment_version(x)  # a transport writes to memory, and autograd must learn that a graph's value is gone
        return x

    def _reduce_(self, source: Tensor, x: Tensor, op: str, scale: float) -> None:
        """Reduce contiguous `source` into `x`, which may be the same, and scale it.

        Natively if the transport can, else by gathering.
        """
        native = self._reduces(x.dtype, op)
        if native and 0 < x.nbytes <= self.settings.max_message_bytes:
            self._allreduce_(source, x, op, scale)
            return
        if source is not x:
            x.copy_(source)
        for piece in wire.pieces(x.view(-1), self.settings.max_message_bytes):
            if native:
                self._allreduce_(piece, piece, op, scale)
                continue
            parts = self._allgather_whole(piece, [piece.numel()] * self.size).view(self.size, -1)
            piece.copy_(reductions.reduce_in_order(list(parts.unbind()), op))
            scale_(piece, scale)

    def _bcast_tensor(self, x: Tensor | None, on_gpu: bool, root: int, into: Tensor | None = None) -> Tensor:
        """The contiguous tensor of `root`: one message where header and payload fit a block, else two.

        into: a tensor like it that may be overwritten; what is returned is this one, if the transport can write there.
        Its version counter is raised.
        """
        if x is not None:
            layout = wire.Layout.of((wire.TensorSpec(x.dtype, x.shape, on_gpu),))
            data = wire.Header(Kind.TENSOR, 0, 0, layout).encode()
            inline = x.nbytes <= BLOCK_BYTES - 8 - len(data) and not x.is_cuda
            self._bcast_bytes(data + wire.read_memory(x) if inline else data, root)
            if not inline:
                self._bcast_flat(x.view(-1), root)
            return x
        data = self._bcast_bytes(None, root)
        header, start = wire.Header.decode(data)
        spec, nbytes = header.layout.specs[0], header.layout.nbytes
        if len(data) == start + nbytes:
            received = wire.tensor_in(data, start, nbytes, spec)
        else:
            received = self._room(spec.shape, spec) if into is None or spec.on_gpu or not _is_plain(into) else into
            self._bcast_flat(received.view(-1), root)
            if received is into:
                increment_version(received)
        return received.to(self.device) if spec.on_gpu else received

    def _bcast_bytes(self, data: Any, root: int) -> bytes:
        """The bytes of `root`, on every rank: in one block if they fit, else in two broadcasts."""
        block = self._block_view
        if self.rank == root:
            length = len(data)
            struct.pack_into("<q", block, 0, length)
            if length <= BLOCK_BYTES - 8:
                block[8 : 8 + length] = data if isinstance(data, bytes) else wire.to_bytes(data)
        self._bcast_(self._block, root)
        (length,) = struct.unpack_from("<q", block)
        if length <= BLOCK_BYTES - 8:
            return bytes(block[8 : 8 + length])
        rest = wire.from_buffer(data) if self.rank == root else wire.room(length)
        self._bcast_flat(rest, root)
        return data if self.rank == root else wire.to_bytes(rest)

    def _bcast_flat(self, flat: Tensor, root: int) -> None:
        for piece in wire.pieces(flat, self.settings.max_message_bytes):
            self._bcast_(piece, root)

    def _allgather_whole(self, flat: Tensor, counts: Sequence[int]) -> Tensor:
        """All ranks' flat buffers, of `counts[rank]` elements, one behind the other."""
        whole = torch.empty(sum(counts), dtype=flat.dtype, device=flat.device)
        if whole.nbytes <= self.settings.max_message_bytes:
            self._allgather_(flat, whole, counts)
            return whole
        parts = whole.split(list(counts))
        parts[self.rank].copy_(flat)
        others = [peer for peer in range(self.size) if peer != self.rank]
        self._exchange_pieces(dict.fromkeys(others, flat), {peer: parts[peer] for peer in others})
        return whole

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        counts = self._allgather_counts(len(data))
        whole = wire.to_bytes(self._allgather_whole(wire.from_bytes(data), counts))
        ends = list(accumulate(counts))
        return [whole[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def _allgather_plain(self, value: Any) -> list[Any]:
        """Every rank's plain value, in rank order; with no check before: the path that the checks themselves use."""
        return [plain.decode(data) for data in self._allgather_bytes(plain.encode(value))]

    def _allgather_counts(self, count: int) -> list[int]:
        """Every rank's number, in rank order."""
        counts = self._allgather_whole(torch.tensor([count], device="cpu"), [1] * self.size)
        return counts.tolist()

    def _payload(self, x: Tensor) -> Tensor | None:
        """`x` as it may travel with the number that ranks compare; None if it may not. The same on ranks that agree."""
        if not 0 < x.nbytes <= min(self.carried_bytes, self.settings.max_message_bytes):
            return None
        if x.dtype not in reductions.REDUCED_BY_TORCH:
            return None
        payload = self._outgoing(x)
        return staging.to_host(payload) if payload.is_cuda else payload

    def _swap(self, xs: Sequence[Tensor] | Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Give every rank its element of `xs`, and get one of `shapes[peer]` from each."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        incoming = {peer: self._room(shapes[peer], xs[peer]) for peer in others}
        self._exchange_pieces({peer: self._outgoing(xs[peer]) for peer in others}, incoming)
        mine = xs[self.rank].detach().clone()
        return tuple(mine if peer == self.rank else self._arrived(incoming[peer], mine) for peer in range(self.size))

    def _exchange_pieces(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Swap contiguous buffers with peers, each pair in as many rounds as its buffer needs."""
        for out, into in self._rounds(outgoing, incoming):
            self._exchange(out, into)

    def _start_exchange_pieces(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Exchange:
        """Start what `_exchange_pieces` does; no buffer may be touched until the exchange has been waited for."""
        started = [self._start_exchange(out, into) for out, into in self._rounds(outgoing, incoming)]
        return started[0] if len(started) == 1 else _All(started)

    def _rounds(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
    ) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
        """What goes out and what comes in, round by round, each message no larger than the limit."""
        limit = self.settings.max_message_bytes
        out = {peer: list(wire.pieces(x.view(-1), limit)) for peer, x in outgoing.items() if x.numel()}
        into = {peer: list(wire.pieces(x.view(-1), limit)) for peer, x in incoming.items() if x.numel()}
        rounds = max((len(parts) for parts in (*out.values(), *into.values())), default=0)
        for turn in range(rounds):
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


def scale_(x: Tensor, scale: float) -> None:
    """Multiply in place, unless by one."""
    if scale != 1.0:
        x.mul_(scale)


class StartedExchange:
    """Buffers on their way, and the room for those that come in; the watchdog sees whoever waits for them."""

    def __init__(
        self,
        comm: Communicator,
        operation: str,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, int],
        like: Tensor,
    ):
        self._comm, self._operation, self._like = comm, operation, like
        spec = wire.TensorSpec(torch.uint8, (), like.is_cuda)
        self._rooms = {peer: comm._room((nbytes,), spec) for peer, nbytes in incoming.items()}
        if like.is_cuda:
            outgoing = {peer: comm._outgoing(x) for peer, x in outgoing.items()}
        largest = max([x.nbytes for x in (*outgoing.values(), *self._rooms.values())], default=0)
        # Most messages are small enough to travel whole.
        whole = largest <= comm.settings.max_message_bytes
        start = comm._start_exchange if whole else comm._start_exchange_pieces
        with Wait(comm, operation):
            self._exchange = start(outgoing, self._rooms)

    def received(self) -> dict[int, Tensor]:
        """Waits for the buffers of other ranks and returns them by peer; what was sent may still be read."""
        peer = next(iter(self._rooms)) if len(self._rooms) == 1 else None
        with Wait(self._comm, self._operation, peer):
            self._exchange.wait_received()
        return {peer: self._comm._arrived(room, self._like) for peer, room in self._rooms.items()}
