"""The messages of a halo exchange: one per neighbour, with the boxes of a plan packed one after the other.

A message begins with a header of six integers that identify the exchange, so that ranks whose plans, batches or dtypes
differ raise an error instead of using the wrong numbers.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.communicators import arguments
from torchmn.communicators.buffers import StartedExchange
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages import wire
from torchmn.errors import ArgumentError, MismatchError
from torchmn.geometry import BoxCopy, HaloPlan

EXCHANGE, SCATTER_ADD = 0, 1
_OPERATIONS = ("halo_exchange", "the backward of halo_exchange")
_HEADER = struct.Struct("=6q")  # 48 bytes: the elements behind it are aligned to 16 bytes, for any dtype


class _MessageLayout(NamedTuple):
    """Size of a message, and shape, strides and offset (in elements) of each block in it."""

    nbytes: int
    views: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]


class _ExchangeLayout(NamedTuple):
    """The layouts of all messages of an exchange, by peer."""

    header: bytes  # the same on all ranks of an exchange
    outgoing: dict[int, _MessageLayout]
    incoming: dict[int, _MessageLayout]
    incoming_sizes: dict[int, int]  # in bytes


@lru_cache(maxsize=4096)
def _fingerprint(plan: HaloPlan) -> int:
    """Returns a number that is the same on all ranks that cut the same image in the same way."""
    return arguments.fingerprint(("halo plan", str(plan.dims)))


@lru_cache(maxsize=4096)
def _exchange_layout(
    plan: HaloPlan, direction: int, dtype: torch.dtype, leading: tuple[int, ...], wants_gradient: bool
) -> _ExchangeLayout:
    number = _fingerprint(plan)
    dims = arguments.fingerprint(("leading dims", leading))  # (2, 3) and (3, 2) have messages of the same size
    header = _HEADER.pack(number, direction, wire.DTYPE_CODES[dtype], prod(leading), int(wants_gradient), dims)
    sent, received = (plan.sends, plan.receives) if direction == EXCHANGE else (plan.receives, plan.sends)
    outgoing = {peer: _message_layout(boxes, leading, dtype.itemsize) for peer, boxes in sent.items()}
    incoming = {peer: _message_layout(boxes, leading, dtype.itemsize) for peer, boxes in received.items()}
    sizes = {peer: layout.nbytes for peer, layout in incoming.items()}
    return _ExchangeLayout(header, outgoing, incoming, sizes)


def _message_layout(boxes: Sequence[BoxCopy], leading: tuple[int, ...], itemsize: int) -> _MessageLayout:
    views: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    at = _HEADER.size // itemsize
    for box in boxes:
        shape = (*leading, *box.source_shape)
        views.append((shape, tuple(prod(shape[dim + 1 :]) for dim in range(len(shape))), at))
        at += prod(shape)
    return _MessageLayout(at * itemsize, tuple(views))


class HaloMessages:
    """The messages of one exchange: the constructor packs and sends them, `wait` receives and unpacks.

    Args:
        comm: communicator of the ranks that share the image.
        plan: this rank's plan among them.
        direction: `EXCHANGE` or `SCATTER_ADD`.
        blocks: by peer, the tensors to send, one per box: those that the plan sends, for `SCATTER_ADD` those that it
            receives.
        like: a tensor with the dtype, the device and the leading dims of the messages.
        wants_gradient: whether a backward follows; the same on all ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: HaloPlan,
        direction: int,
        blocks: Mapping[int, Sequence[Tensor]],
        like: Tensor,
        wants_gradient: bool,
    ):
        self._comm = comm
        self._operation = _OPERATIONS[direction]
        self._like = like
        self._exchange: StartedExchange | None = None
        if not plan.anyone_exchanges:
            return
        leading = tuple(like.shape[: like.dim() - len(plan.dims)])
        self._layout = layout = _exchange_layout(plan, direction, like.dtype, leading, wants_gradient)
        messages = {peer: self._packed(message, blocks[peer]) for peer, message in layout.outgoing.items()}

        def same() -> dict[str, Any]:
            values = {"plan": f"{_fingerprint(plan):x}", "dtype": like.dtype, "batch and channels": leading}
            return values | {"with a gradient": wants_gradient}

        self._exchange = comm.exchange(self._operation, messages, layout.incoming_sizes, like, same, layout.header)

    def wait(self) -> dict[int, list[Tensor]]:
        """Waits for the messages; returns the blocks of the boxes by peer, each (*leading, *source shape)."""
        if self._exchange is None:
            return {}
        try:
            received = self._exchange.received()
        except RuntimeError as error:  # of the transport or of torch: the message does not fit
            raise self._mismatch(f"a message does not have the expected size ({error})") from error
        self._exchange = None
        return {peer: self._unpacked(peer, message) for peer, message in received.items()}

    def _packed(self, layout: _MessageLayout, blocks: Sequence[Tensor]) -> Tensor:
        like = self._like
        message = torch.empty(layout.nbytes, dtype=torch.uint8, device=like.device)
        elements = message.view(like.dtype)
        for view, block in zip(layout.views, blocks, strict=True):
            elements.as_strided(*view).copy_(block)
        if not like.is_cuda:
            ctypes.memmove(message.data_ptr(), self._layout.header, _HEADER.size)
        return message

    def _unpacked(self, peer: int, message: Tensor) -> list[Tensor]:
        if not message.is_cuda:  # reading the header on a GPU would wait for the device
            got = ctypes.string_at(message.data_ptr(), _HEADER.size)
            if got != self._layout.header:
                raise self._mismatch(f"rank {peer} is in another exchange", f", got {_described(got)}")
        elements = message.view(self._like.dtype)
        return [elements.as_strided(*view) for view in self._layout.incoming[peer].views]

    def _mismatch(self, what: str, got: str = "") -> MismatchError:
        comm = self._comm
        return MismatchError(
            f"rank {comm.rank} of {comm.size}: {self._operation}: {what}: expected {_described(self._layout.header)}"
            f"{got}. All ranks must make the same exchanges in the same order, with the same plan, batch, channels and "
            "dtype, and all or none with requires_grad."
        )


def _described(header: bytes) -> str:
    plan, direction, dtype, leading, wants_gradient, dims = _HEADER.unpack(header)
    if not (0 <= direction < len(_OPERATIONS) and 0 <= dtype < len(wire.DTYPES)):
        return "something else"
    gradient = ", with a gradient" if wants_gradient else ""
    operation = f"{_OPERATIONS[direction]} (plan {plan:x}, batch and channels {dims:x})"
    return f"{operation} of {leading} x {wire.DTYPES[dtype]}{gradient}"


def check_tile(x: Tensor, plan: HaloPlan, comm: Communicator, shape: tuple[int, ...], what: str) -> None:
    """Raises an ArgumentError unless the last dims of `x` are `shape`, and `plan` is that of this rank in `comm`."""
    problem = arguments.tensor_problem(x)
    if problem is None and (plan.size != comm.size or plan.rank != comm.rank):
        problem = f"expected the plan of rank {comm.rank} of {comm.size}, got that of rank {plan.rank} of {plan.size}"
    if problem is None and (x.dim() < len(shape) or tuple(x.shape[x.dim() - len(shape) :]) != shape):
        problem = f"expected {what} whose last dims are {shape}, got shape {tuple(x.shape)}"
    if problem:
        raise ArgumentError(f"rank {comm.rank} of {comm.size}: halo_exchange: {problem}")
