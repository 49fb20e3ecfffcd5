"""Halos on their way: one message per neighbour, with the boxes of a plan packed one behind the other.

A message begins with a few integers that say which exchange it belongs to. They cost nothing, and ranks whose plans,
batches or dtypes differ get an error instead of each other's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from torchmn.communicators import checks, wire
from torchmn.communicators.base import Communicator
from torchmn.communicators.transport import DONE, Exchange
from torchmn.communicators.watchdog import Wait
from torchmn.errors import ArgumentError, MismatchError
from torchmn.geometry import BoxCopy, DimPlan, HaloPlan

GATHER, SCATTER_ADD = 0, 1
_OPERATIONS = ("halo_exchange", "the backward of halo_exchange")
_HEADER_BYTES = 48  # five integers; then the elements begin at a multiple of 16 bytes, as torch wants to view them

Boxes = Mapping[int, Sequence[BoxCopy]]


@lru_cache(maxsize=4096)
def _header(dims: tuple[DimPlan, ...], direction: int, dtype: torch.dtype, leading: int, gradient: bool) -> Tensor:
    """What a message begins with: the same bytes on all ranks that are in the same exchange."""
    plan = checks.fingerprint(("halo plan", str(dims)))
    words = [plan, direction, wire.DTYPE_CODES[dtype], leading, int(gradient), 0]
    return torch.tensor(words).view(torch.uint8)


class HaloMessages:
    """The messages of one exchange: packed and started when it is made, waited for and unpacked by `arrived`.

    blocks: per peer, the tensors to send, one per box
    incoming: per peer, the boxes whose blocks come from it
    like: its dtype, device and leading dims, those in front of the planned ones, are the messages'
    """

    def __init__(
        self,
        comm: Communicator,
        plan: HaloPlan,
        direction: int,
        blocks: Mapping[int, Sequence[Tensor]],
        incoming: Boxes,
        like: Tensor,
        wants_gradient: bool,
    ):
        self._comm = comm
        self._operation = _OPERATIONS[direction]
        self._incoming = incoming
        self._like = like
        self._leading = tuple(like.shape[: like.dim() - len(plan.dims)])
        self._exchange: Exchange = DONE
        self._rooms: dict[int, Tensor] = {}
        if not plan.anyone_exchanges:
            return
        comm._check_open(self._operation)
        comm._collectives += 1  # all ranks count this exchange: the watchdog tells by it who has not come
        leading = prod(self._leading)
        self._header = _header(plan.dims, direction, like.dtype, leading, wants_gradient)
        messages = {peer: self._packed(parts) for peer, parts in blocks.items()}
        for peer, boxes in incoming.items():
            nbytes = _HEADER_BYTES + leading * like.element_size() * sum(box.elements for box in boxes)
            self._rooms[peer] = comm._room((nbytes,), wire.TensorSpec(torch.uint8, (nbytes,), like.is_cuda))
        with Wait(comm, self._operation):
            self._exchange = comm._start_exchange_pieces(messages, self._rooms)

    def arrived(self) -> dict[int, list[Tensor]]:
        """Per peer, the blocks of its boxes, each (*leading, *source shape): wait for them."""
        if not self._rooms and self._exchange is DONE:
            return {}
        only = next(iter(self._rooms)) if len(self._rooms) == 1 else None
        with Wait(self._comm, self._operation, only):
            self._exchange.wait()
        self._exchange = DONE
        return {peer: self._unpacked(peer, self._comm._arrived(room, self._like)) for peer, room in self._rooms.items()}

    def _packed(self, blocks: Sequence[Tensor]) -> Tensor:
        like = self._like
        elements = sum(block.numel() for block in blocks)
        nbytes = _HEADER_BYTES + elements * like.element_size()
        message = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        if not like.is_cuda:
            message[:_HEADER_BYTES] = self._header
        payload = message[_HEADER_BYTES:].view(like.dtype)
        at = 0
        for block in blocks:
            payload[at : at + block.numel()].view(block.shape).copy_(block)
            at += block.numel()
        return self._comm._outgoing(message)

    def _unpacked(self, peer: int, message: Tensor) -> list[Tensor]:
        if not message.is_cuda:  # on a GPU a look at the header would wait for the device
            self._check(peer, message[:_HEADER_BYTES])
        payload = message[_HEADER_BYTES:].view(self._like.dtype)
        blocks, at = [], 0
        for box in self._incoming[peer]:
            shape = (*self._leading, *box.source_shape)
            blocks.append(payload[at : at + prod(shape)].view(shape))
            at += prod(shape)
        return blocks

    def _check(self, peer: int, got: Tensor) -> None:
        if torch.equal(got, self._header):
            return
        comm = self._comm
        raise MismatchError(
            f"rank {comm.rank} of {comm.size}: {self._operation}: rank {peer} is in another exchange: "
            f"expected {_described(self._header)}, got {_described(got)}. All ranks must make the same exchanges in "
            "the same order, with the same plan, batch, channels and dtype, and all or none with requires_grad."
        )


def _described(header: Tensor) -> str:
    plan, direction, dtype, leading, wants_gradient, _ = header.view(torch.int64).tolist()
    if not (0 <= direction < len(_OPERATIONS) and 0 <= dtype < len(wire.DTYPES)):
        return "something else"
    gradient = ", with a gradient" if wants_gradient else ""
    return f"{_OPERATIONS[direction]} (plan {plan:x}) of {leading} x {wire.DTYPES[dtype]}{gradient}"


def check_part(x: Tensor, plan: HaloPlan, comm: Communicator, shape: tuple[int, ...], what: str) -> None:
    """ArgumentError unless the last dims of `x` are `shape`, and the plan is this rank's of this communicator."""
    problem = checks.tensor_problem(x)
    if problem is None and (plan.size != comm.size or plan.rank != comm.rank):
        problem = f"expected the plan of rank {comm.rank} of {comm.size}, got that of rank {plan.rank} of {plan.size}"
    if problem is None and (x.dim() < len(shape) or tuple(x.shape[x.dim() - len(shape) :]) != shape):
        problem = f"expected {what} whose last dims are {shape}, got shape {tuple(x.shape)}"
    if problem:
        raise ArgumentError(f"rank {comm.rank} of {comm.size}: halo_exchange: {problem}")
