"""Sending as a step of the computation: the gradient comes back from the rank that received.

Differentiable with respect to every floating-point tensor that is sent. The adjoint of sending is receiving.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators import checks
from torchmn.communicators.base import Communicator
from torchmn.communicators.edges import Edge, Place
from torchmn.communicators.watchdog import Wait
from torchmn.communicators.wire import Kind, Message
from torchmn.functions.anchor import ANCHOR


def send(x: Tensor | Sequence[Tensor], comm: Communicator, rank: int, tag: int = 0) -> Tensor:
    """A delegate for what was sent: a 0-d float tensor, zero, through which backward finds its way to `x`.

    `x` is a tensor, or a tuple or list of them, for `recv` on `rank`. Like `comm.send` this does not wait. The
    delegate must take part in this rank's backward: `phi.backward()`, `(loss + phi).backward()`,
    `recv(..., delegate_variable=phi)` or `pseudo_connect(phi, y)`. Its backward waits for the gradient from `rank`.
    """
    comm._check_peer("send", "rank", rank, tag)
    many = isinstance(x, list | tuple)
    tensors: Any = x if many else (x,)
    for item in tensors:
        problem = checks.tensor_problem(item)
        if problem:
            comm._refuse_to_send("send", rank, tag, f"{problem} (for other objects: comm.send_obj)")
    if not torch.is_grad_enabled():
        _post(comm, many, tensors, (), 0, rank, tag)
        return torch.zeros(())
    # The anchor makes a delegate that needs a gradient of anything, so that every rank can call backward on it.
    return _Send.apply(ANCHOR, comm, rank, Place.of_caller(tag, sys._getframe(1)), many, *tensors)  # type: ignore[return-value]


def _post(
    comm: Communicator,
    many: bool,
    tensors: Sequence[Tensor],
    wants_gradient: tuple[bool, ...],
    number: int,
    dest: int,
    tag: int,
) -> None:
    if not many and comm._send_at_once(tensors[0], dest, tag, number, bool(number)):
        return
    message = Message(Kind.TUPLE if many else Kind.TENSOR, tuple(tensors), number, wants_gradient)
    comm._send_message(message, dest, tag)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, comm: Communicator, dest: int, place: Place, many: bool, *tensors: Tensor
    ) -> Tensor:
        wants_gradient = tuple([x.requires_grad for x in tensors])
        ctx.comm, ctx.wants_gradient = comm, wants_gradient
        ctx.edge = comm._edges.send(dest, place) if any(wants_gradient) else None
        number = ctx.edge.key[1] if ctx.edge else 0
        _post(comm, many, tensors, wants_gradient, number, dest, place.tag)
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 5
        edge: Edge | None = ctx.edge
        if edge is None:
            return (*nothing, *[None] * len(ctx.wants_gradient))
        comm: Communicator = ctx.comm
        edge.visited()
        with Wait(comm, "backward of send", edge.key[0], edge.place.tag):
            answer = comm._edges.await_answer(comm, edge.key)
        gradients = iter(answer.tensors)
        return (*nothing, *[next(gradients, None) if wanted else None for wanted in ctx.wants_gradient])
