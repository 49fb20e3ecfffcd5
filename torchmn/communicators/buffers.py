"""`Buffers` moves whole tensors over a transport: copies them to the host if necessary, splits and converts them.

Nothing is checked here: ranks have agreed before.
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
"""Size of the first message of a broadcast: the header and, if it fits, the payload."""


class Buffers:
    """The data movements of which the operations of a communicator consist.

    Attributes:
        staged: returns a tensor detached and contiguous, in memory that the transport can read; the tensor itself if it
            is so already.
    """

    def __init__(self, transport: Transport):
        group = transport.group
        self.transport = transport
        self.rank = group.rank
        self.size = group.size
        self.settings = group.settings
        self._others = [peer for peer in range(group.size) if peer != group.rank]
        self._reads_gpu_memory = transport.traits.reads_gpu_memory
        self.staged = partial(staging.plain_memory, on_host=not self._reads_gpu_memory)
        self._block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        self._block_view = self._block.numpy().data

    def empty(self, shape: Sequence[int], like: Tensor | wire.TensorSpec) -> Tensor:
        """Returns an empty tensor of `shape`, with the dtype of `like`, into which the transport can receive."""
        on_gpu = like.on_gpu if isinstance(like, wire.TensorSpec) else like.is_cuda
        if on_gpu and self._reads_gpu_memory:
            return torch.empty(tuple(shape), dtype=like.dtype, device=self.settings.device)
        return torch.empty(tuple(shape), dtype=like.dtype, device="cpu")

    def moved_like(self, received: Tensor, like: Tensor) -> Tensor:
        """Returns `received` on the GPU of `like`; as it is, if that is on the host."""
        return received.to(like.device) if like.is_cuda else received

    def move_to_gpu(self, message: wire.Message) -> wire.Message:
        """Returns the message, with the tensors that were sent from a GPU moved to this rank's GPU."""
        pairs = zip(message.tensors, message.on_gpu, strict=True)
        message.tensors = tuple(x.to(self.settings.device) if gpu else x for x, gpu in pairs)
        return message

    def reduce(self, x: Tensor, op: str, in_place: bool) -> Tensor:
        """Returns the reduction of `x` over all ranks; see `Communicator.allreduce`."""
        dtype = x.dtype
        accumulator = reductions.ACCUMULATORS[dtype]
        source = self.staged(x)
        if dtype != accumulator:
            source = total = source.to(accumulator)
        elif source.data_ptr() != x.data_ptr() or in_place:
            total = source
        else:
            total = torch.empty_like(source)
        operation = reductions.accumulating_operation(dtype, op)
        self._reduce_(source, total, operation, 1 / self.size if op == "mean" else 1.0)
        if not in_place:
            return self.moved_like(total if dtype == accumulator else total.to(dtype), x)
        if total.data_ptr() != x.data_ptr():
            x.detach().copy_(total)
        else:
            increment_version(x)  # the transport wrote to memory, which autograd does not see
        return x

    def _reduce_(self, source: Tensor, out: Tensor, op: str, scale: float) -> None:
        """Reduces contiguous `source` over ranks into `out`, which may be the same, and scales it."""
        limit = self.settings.max_message_bytes
        if 0 < out.nbytes <= limit and self.transport.allreduce_(source, out, op, scale):
            return
        if source is not out:
            out.copy_(source)
        for piece in wire.pieces(out.view(-1), limit):
            if not self.transport.allreduce_(piece, piece, op, scale):
                parts = self.allgather_flat(piece, [piece.numel()] * self.size).view(self.size, -1)
                piece.copy_(reductions.reduce_in_order(list(parts.unbind()), op))
                reductions.scale_(piece, scale)

    def bcast_tensor(
        self, x: Tensor | None, on_gpu: bool, root: int, into: Tensor | None = None, kind: Kind = Kind.TENSOR
    ) -> Tensor:
        """Returns the tensor of `root`, on every rank: by one message if header and payload fit a block, else by two.

        Args:
            x: the contiguous tensor, on `root`; None on other ranks.
            on_gpu: whether it is on a GPU, on `root`.
            root: the rank whose tensor is sent.
            into: a tensor of the same shape and dtype, which is overwritten and returned if the transport can write to
                it. Its version counter is incremented.
            kind: of the message, on `root`.

        Returns:
            The tensor; an `ArrayTensor` on ranks other than `root`, if `kind` is `ARRAY`.
        """
        if x is not None:
            layout = wire.Layout.of((wire.TensorSpec(x.dtype, x.shape, on_gpu),))
            data = wire.Header(kind, 0, 0, layout).encode()
            inline = x.nbytes <= BLOCK_BYTES - 8 - len(data) and not x.is_cuda
            self.bcast_bytes(data + wire.read_memory(x) if inline else data, root)
            if not inline:
                self.bcast_flat(x.view(-1), root)
            return x
        data = self.bcast_bytes(None, root)
        header, start = wire.Header.decode(data)
        spec, nbytes = header.layout.specs[0], header.layout.nbytes
        if len(data) == start + nbytes:
            received = wire.tensor_in(data, start, nbytes, spec)
        else:
            received = self.empty(spec.shape, spec) if into is None or spec.on_gpu or not _is_plain(into) else into
            self.bcast_flat(received.view(-1), root)
            if received is into:
                increment_version(received)
        if header.kind == Kind.ARRAY:
            return received.as_subclass(wire.ArrayTensor)
        return received.to(self.settings.device) if spec.on_gpu else received

    def bcast_bytes(self, data: Any, root: int) -> bytes:
        """Returns the bytes of `root`, on every rank: by one broadcast if they fit a block, else by two."""
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
        rest = wire.from_buffer(data) if self.rank == root else wire.empty_bytes(length)
        self.bcast_flat(rest, root)
        return data if self.rank == root else wire.to_bytes(rest)

    def bcast_flat(self, flat: Tensor, root: int) -> None:
        """Overwrites a flat contiguous tensor, whose dtype and length all ranks know, with that of `root`."""
        for piece in wire.pieces(flat, self.settings.max_message_bytes):
            self.transport.bcast_(piece, root)

    def allgather_flat(self, flat: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the concatenation of all ranks' flat buffers, of `counts[rank]` elements, in rank order."""
        whole = torch.empty(sum(counts), dtype=flat.dtype, device=flat.device)
        if whole.nbytes <= self.settings.max_message_bytes:
            self.transport.allgather_(flat, whole, counts)
            return whole
        parts = whole.split(list(counts))
        parts[self.rank].copy_(flat)
        self.exchange(dict.fromkeys(self._others, flat), {peer: parts[peer] for peer in self._others})
        return whole

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's bytes, in rank order."""
        counts = self.allgather_counts(len(data))
        whole = wire.to_bytes(self.allgather_flat(wire.from_bytes(data), counts))
        ends = list(accumulate(counts))
        return [whole[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def allgather_plain(self, value: Any) -> list[Any]:
        """Returns every rank's plain value, in rank order, without any check: agreements use it."""
        return [plain_values.decode(data) for data in self.allgather_bytes(plain_values.encode(value))]

    def allgather_counts(self, count: int) -> list[int]:
        """Returns every rank's number, in rank order."""
        counts = self.allgather_flat(torch.tensor([count], device="cpu"), [1] * self.size)
        return counts.tolist()

    def alltoall(self, xs: Sequence[Tensor] | Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Sends `xs[peer]` to every rank, and returns the tensors, of `shapes[peer]`, that they send to this rank."""
        incoming = {peer: self.empty(shapes[peer], xs[peer]) for peer in self._others}
        self.start_exchange({peer: self.staged(xs[peer]) for peer in self._others}, incoming).wait()
        own = xs[self.rank].detach().clone()
        if own.is_cuda:
            incoming = {peer: self.moved_like(x, own) for peer, x in incoming.items()}
        incoming[self.rank] = own
        return tuple([incoming[peer] for peer in range(self.size)])

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Sends and receives contiguous buffers, by peer."""
        self.start_exchange(outgoing, incoming).wait()

    def start_exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Exchange:
        """Starts what `exchange` does. No buffer may be used until the returned exchange has been waited for."""
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
        return _Exchanges([self.transport.exchange(*each) for each in self._rounds(out, into)])

    def _rounds(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
    ) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
        """Yields the exchanges, with messages no larger than the limit, into which an exchange is split.

        Each pair of ranks takes part in as many of them as its buffer needs.
        """
        limit = self.settings.max_message_bytes
        out = {peer: list(wire.pieces(x, limit)) for peer, x in outgoing.items()}
        into = {peer: list(wire.pieces(x, limit)) for peer, x in incoming.items()}
        for index in range(max(len(parts) for parts in (*out.values(), *into.values()))):
            yield (
                {peer: parts[index] for peer, parts in out.items() if index < len(parts)},
                {peer: parts[index] for peer, parts in into.items() if index < len(parts)},
            )


class _Exchanges:
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
    """Returns whether `x` is on the host, contiguous, and its memory holds the values that it shows."""
    return x.is_cpu and x.is_contiguous() and not x.is_conj() and not x.is_neg()


class StartedExchange:
    """Byte buffers in flight, and memory for those to receive. A wait for them is registered with the watchdog."""

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
        self._received = {
            peer: torch.empty(nbytes, dtype=torch.uint8, device=device) for peer, nbytes in incoming.items()
        }
        if like.is_cuda:
            outgoing = {peer: buffers.staged(x) for peer, x in outgoing.items()}
        with Wait(buffers.transport.group, operation):
            self._exchange = buffers.start_exchange(outgoing, self._received)

    def received(self) -> dict[int, Tensor]:
        """Waits for the buffers of other ranks and returns them by peer. Those to send may still be read."""
        peer = next(iter(self._received)) if len(self._received) == 1 else None
        with Wait(self._buffers.transport.group, self._operation, peer):
            self._exchange.wait_received()
        if not self._like.is_cuda:
            return self._received
        return {peer: x.to(self._like.device) for peer, x in self._received.items()}
