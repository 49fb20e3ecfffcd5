"""Halos on their way: one message per neighbour, with the boxes of a plan packed one behind the other.

A message begins with a few integers that say which exchange it belongs to. They cost nothing, and ranks whose plans,
batches or dtypes differ get an error instead of each other's numbers.
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

GATHER, SCATTER_ADD = 0, 1
_OPERATIONS = ("halo_exchange", "the backward of halo_exchange")
_HEADER = struct.Struct(
    "=6q"
)  # 48 bytes: the elements behind it begin at a multiple of 16, as torch wants to view them


class _Letter(NamedTuple):
    """A message to or from a peer: its size, and where its blocks lie: shape, strides and offset in elements."""

    nbytes: int
    views: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]


class _Route(NamedTuple):
    """All messages of an exchange of one plan and one kind of tensor: worked out once, for all steps."""

    header: bytes  # the same on all ranks that are in the same exchange
    outgoing: dict[int, _Letter]
    incoming: dict[int, _Letter]
    sizes: dict[int, int]  # of what comes in, in bytes


@lru_cache(maxsize=4096)
def _fingerprint(plan: HaloPlan) -> int:
    """The same number on all ranks that have cut the same image in the same way."""
    return arguments.fingerprint(("halo plan", str(plan.dims)))


@lru_cache(maxsize=4096)
def _route(
    plan: HaloPlan, direction: int, dtype: torch.dtype, leading: tuple[int, ...], wants_gradient: bool
) -> _Route:
    number = _fingerprint(plan)
    dims = arguments.fingerprint(("leading dims", leading))  # (2, 3) and (3, 2) are messages of one size
    header = _HEADER.pack(number, direction, wire.DTYPE_CODES[dtype], prod(leading), int(wants_gradient), dims)
    there, back = (plan.sends, plan.receives) if direction == GATHER else (plan.receives, plan.sends)
    outgoing = {peer: _letter(boxes, leading, dtype.itemsize) for peer, boxes in there.items()}
    incoming = {peer: _letter(boxes, leading, dtype.itemsize) for peer, boxes in back.items()}
    return _Route(header, outgoing, incoming, {peer: letter.nbytes for peer, letter in incoming.items()})


def _letter(boxes: Sequence[BoxCopy], leading: tuple[int, ...], itemsize: int) -> _Letter:
    views, at = [], _HEADER.size // itemsize
    for box in boxes:
        shape = (*leading, *box.source_shape)
        views.append((shape, tuple(prod(shape[dim + 1 :]) for dim in range(len(shape))), at))
        at += prod(shape)
    return _Letter(at * itemsize, tuple(views))


class HaloMessages:
    """The messages of one exchange: packed and started when it is made, waited for and unpacked by `arrived`.

    blocks: per peer, the tensors to send, one per box: those that the plan sends, in backward those that it receives
    like: its dtype, device and leading dims, those in front of the planned ones, are the messages'
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
        self._route = route = _route(plan, direction, like.dtype, leading, wants_gradient)
        messages = {peer: self._packed(letter, blocks[peer]) for peer, letter in route.outgoing.items()}

        def same() -> dict[str, Any]:
            what = {"plan": f"{_fingerprint(plan):x}", "dtype": like.dtype, "batch and channels": leading}
            return what | {"with a gradient": wants_gradient}

        self._exchange = comm.exchange(self._operation, messages, route.sizes, like, same)

    def arrived(self) -> dict[int, list[Tensor]]:
        """Per peer, the blocks of its boxes, each (*leading, *source shape): wait for them."""
        if self._exchange is None:
            return {}
        try:
            received = self._exchange.received()
        except RuntimeError as error:  # the transport's, or torch's, about a message that has no room
            raise self._mismatch(f"what came does not have the expected size ({error})") from error
        self._exchange = None
        return {peer: self._unpacked(peer, message) for peer, message in received.items()}

    def _packed(self, letter: _Letter, blocks: Sequence[Tensor]) -> Tensor:
        like = self._like
        message = torch.empty(letter.nbytes, dtype=torch.uint8, device=like.device)
        elements = message.view(like.dtype)
        for view, block in zip(letter.views, blocks, strict=True):
            elements.as_strided(*view).copy_(block)
        if not like.is_cuda:
            ctypes.memmove(message.data_ptr(), self._route.header, _HEADER.size)
        return message

    def _unpacked(self, peer: int, message: Tensor) -> list[Tensor]:
        if not message.is_cuda:  # on a GPU a look at the header would wait for the device
            got = ctypes.string_at(message.data_ptr(), _HEADER.size)
            if got != self._route.header:
                raise self._mismatch(f"rank {peer} is in another exchange", f", got {_described(got)}")
        elements = message.view(self._like.dtype)
        return [elements.as_strided(*view) for view in self._route.incoming[peer].views]

    def _mismatch(self, what: str, got: str = "") -> MismatchError:
        comm = self._comm
        return MismatchError(
            f"rank {comm.rank} of {comm.size}: {self._operation}: {what}: expected {_described(self._route.header)}"
            f"{got}. All ranks must make the same exchanges in the same order, with the same plan, batch, channels and "
            "dtype, and all or none with requires_grad."
        )


def _described(header: bytes) -> str:
    plan, direction, dtype, leading, wants_gradient, dims = _HEADER.unpack(header)
    if not (0 <= direction < len(_OPERATIONS) and 0 <= dtype < len(wire.DTYPES)):
        return "something else"
    gradient = ", with a gradient" if wants_gradient else ""
    what = f"{_OPERATIONS[direction]} (plan {plan:x}, batch and channels {dims:x})"
    return f"{what} of {leading} x {wire.DTYPES[dtype]}{gradient}"


def check_part(x: Tensor, plan: HaloPlan, comm: Communicator, shape: tuple[int, ...], what: str) -> None:
    """ArgumentError unless the last dims of `x` are `shape`, and the plan is this rank's of this communicator."""
    problem = arguments.tensor_problem(x)
    if problem is None and (plan.size != comm.size or plan.rank != comm.rank):
        problem = f"expected the plan of rank {comm.rank} of {comm.size}, got that of rank {plan.rank} of {plan.size}"
    if problem is None and (x.dim() < len(shape) or tuple(x.shape[x.dim() - len(shape) :]) != shape):
        problem = f"expected {what} whose last dims are {shape}, got shape {tuple(x.shape)}"
    if problem:
        raise ArgumentError(f"rank {comm.rank} of {comm.size}: halo_exchange: {problem}")
