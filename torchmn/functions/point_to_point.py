"""The two nodes of autograd's graph that `send` and `recv` make. Each is the other one's adjoint.

When backward is itself to be differentiated (`create_graph=True`), the gradient travels by the same two nodes: the
answer to an edge is then an edge, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.communicators.edges import HIGHER_ORDER, Edge, Key, Place
from torchmn.communicators.watchdog import Wait
from torchmn.communicators.wire import Kind, Message
from torchmn.functions.anchor import ANCHOR


def post(comm: Communicator, many: bool, tensors: Sequence[Tensor], dest: int, tag: int) -> None:
    """Send tensors that want no gradient."""
    if not many and comm._send_at_once(tensors[0], dest, tag):
        return
    comm._send_message(Message(Kind.TUPLE if many else Kind.TENSOR, tuple(tensors)), dest, tag)


class Send(torch.autograd.Function):
    """Sends tensors; its output is the delegate."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, comm: Communicator, dest: int, place: Place, many: bool, *tensors: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        wants_gradient = tuple([x.requires_grad for x in tensors])
        ctx.comm, ctx.wants_gradient, ctx.edge = comm, wants_gradient, None
        if True not in wants_gradient:
            post(comm, many, tensors, dest, place.tag)
            return torch.zeros(())
        ctx.edge = edge = comm._edges.send(comm, dest, place)
        number = edge.key[1]
        if many or not comm._send_at_once(tensors[0], dest, place.tag, number, True):
            kind = Kind.TUPLE if many else Kind.TENSOR
            comm._send_message(Message(kind, tensors, number, wants_gradient), dest, place.tag)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, delegates_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * 5 + _gradients_of_sent(ctx, delegates_gradient)


class _Answer(torch.autograd.Function):
    """Sends the gradients of a received edge as an edge of its own."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, edge: Edge, *gradients: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.comm, ctx.wants_gradient, ctx.edge = comm, tuple([g.requires_grad for g in gradients]), None
        if any(ctx.wants_gradient):
            peer, number = edge.key
            ctx.edge = comm._edges.send_as(comm, (peer, number + HIGHER_ORDER), edge.place)
        comm._edges.answer(comm, edge.key, gradients, edge.place, ctx.wants_gradient)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, delegates_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * 2 + _gradients_of_sent(ctx, delegates_gradient)


def _gradients_of_sent(ctx: Any, delegates_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients that come back for the tensors of a `Send`; None for those that want none, or got none."""
    edge: Edge | None = ctx.edge
    if edge is None:
        return (None,) * len(ctx.wants_gradient)
    comm: Communicator = ctx.comm
    visit(comm, edge, "backward of send")
    with Wait(comm, "backward of send", edge.key[0], edge.place.tag, (edge.key, edge.place)):
        message = comm._edges.await_answer(comm, edge.key).message
    gradients = message.tensors
    if torch.is_grad_enabled() and gradients:
        key = (edge.key[0], edge.key[1] + HIGHER_ORDER)
        gradients = joined(message, comm, key, edge.place, delegates_gradient)
    if len(gradients) == len(ctx.wants_gradient):
        return gradients
    remaining = iter(gradients)
    return tuple([next(remaining, None) if wanted else None for wanted in ctx.wants_gradient])


def visit(comm: Communicator, edge: Edge, operation: str) -> None:
    """Note that backward has come by."""
    edge.visited()
    if comm._closed:
        comm._check_open(operation)
    edges = comm._edges
    if edges.unneeded or edges.forgotten or edges.lost_since_backward:
        edges.tend_after_backward(comm)


def joined(message: Message, comm: Communicator, key: Key, place: Place, delegate: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors of a message as part of this rank's graph; grad mode is on."""
    wanted = True in message.wants_gradient
    if delegate is None or not delegate.requires_grad:
        delegate = ANCHOR
        if not wanted:
            return message.tensors
    edge = comm._edges.receive(comm, key, place) if wanted else None
    return _Receive.apply(delegate, comm, edge, message)  # type: ignore[return-value]


class _Receive(torch.autograd.Function):
    """Puts what has been received into the graph, behind it the delegate."""

    @staticmethod
    def forward(
        ctx: Any, delegate: Tensor, comm: Communicator, edge: Edge | None, message: Message
    ) -> tuple[Tensor, ...]:
        ctx.comm, ctx.edge, ctx.wants_gradient = comm, edge, message.wants_gradient
        ctx.delegate = None if delegate is ANCHOR else (delegate.shape, delegate.dtype)
        without = [x for x in message.tensors if not (x.is_floating_point() or x.is_complex())]
        if without:
            ctx.mark_non_differentiable(*without)
        return message.tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # No gradient for the delegate: autograd visits it all the same.
        edge: Edge | None = ctx.edge
        if edge is None:
            return (None,) * 4
        comm: Communicator = ctx.comm
        visit(comm, edge, "backward of recv")
        wanted = tuple([g for g, wanted in zip(gradients, ctx.wants_gradient, strict=True) if wanted])
        if not torch.is_grad_enabled():
            comm._edges.answer(comm, edge.key, wanted, edge.place)
            return (None,) * 4
        phi = _Answer.apply(comm, edge, *wanted)
        if ctx.delegate is None or not phi.requires_grad:  # type: ignore[union-attr]
            return (None,) * 4
        # The way to the gradient of what was just sent is through the delegate's gradient.
        shape, dtype = ctx.delegate
        return phi.to(dtype).expand(shape), None, None, None  # type: ignore[union-attr]
