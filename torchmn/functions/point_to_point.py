"""The two nodes of autograd's graph that `send` and `recv` make. Each is the other one's adjoint.

Messages are sent before their node is made, and in as few steps as Python allows: what happens between two messages is
what a message costs. When backward is itself to be differentiated (`create_graph=True`), the gradient travels by
the same two nodes: the answer to an edge is then an edge, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.communicators.edges import HIGHER_ORDER, Edge, Key, Place
from torchmn.communicators.watchdog import Wait
from torchmn.communicators.wire import Message
from torchmn.functions.anchor import ANCHOR


def delegate_of(comm: Communicator, key: Key, place: Place, *tensors: Tensor) -> Tensor:
    """The delegate of tensors that were sent on the edge of that key and want their gradients."""
    return _make_sent(comm._edges.send(comm, key, place), *tensors)


class _Sent(torch.autograd.Function):
    """Stands for tensors that were sent and want a gradient; its output is the delegate."""

    @staticmethod
    def forward(ctx: Any, edge: Edge, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.edge = edge
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, delegates_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        edge: Edge = ctx.edge
        comm = edge.comm
        _visit(edge, "backward of send")
        with Wait(comm, "backward of send", edge.key[0], edge.place[0], (edge.key, edge.place)):
            message = comm._edges.await_answer(comm, edge.key)
        gradients = message.tensors
        if not gradients:  # its receiver did not use it
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            key = (edge.key[0], edge.key[1] + HIGHER_ORDER)
            gradients = joined(message, comm, key, edge.place, delegates_gradient)
        return (None, *gradients)


def joined(message: Message, comm: Communicator, key: Key, place: Place, delegate: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors of a message as part of this rank's graph; grad mode is on."""
    wanted = True in message.wants_gradient
    if delegate is None or not delegate.requires_grad:
        delegate = ANCHOR
        if not wanted:
            return message.tensors
    edge = comm._edges.receive(comm, key, place) if wanted else None
    return _make_received(delegate, edge, message)


class _Received(torch.autograd.Function):
    """Puts what has been received into the graph, behind it the delegate."""

    @staticmethod
    def forward(ctx: Any, delegate: Tensor, edge: Edge | None, message: Message) -> tuple[Tensor, ...]:
        # Each attribute of a node costs as much as half a message's header: one will do where there is one tensor.
        ctx.edge = edge
        if delegate is not ANCHOR or len(message.tensors) > 1:
            ctx.delegate = None if delegate is ANCHOR else (delegate.shape, delegate.dtype)
            ctx.wants_gradient = message.wants_gradient
        return message.tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # No gradient for the delegate: autograd visits it all the same.
        edge: Edge | None = ctx.edge
        if edge is None:
            return None, None, None
        _visit(edge, "backward of recv")
        if len(gradients) > 1:
            wants = ctx.wants_gradient
            gradients = tuple([gradient for gradient, wanted in zip(gradients, wants, strict=True) if wanted])
        if not torch.is_grad_enabled():
            edge.comm._edges.answer(edge.comm, edge.key, gradients, edge.place)
            return None, None, None
        phi = _answer_with_edge(edge, gradients)
        delegate = getattr(ctx, "delegate", None)
        if delegate is None or phi is None:
            return None, None, None
        # The way to the gradient of what was just sent is through the delegate's gradient.
        shape, dtype = delegate
        return phi.to(dtype).expand(shape), None, None


def _answer_with_edge(edge: Edge, gradients: tuple[Tensor, ...]) -> Tensor | None:
    """Send gradients that may want a gradient themselves; the delegate if one does."""
    wants_gradient = tuple([each.requires_grad for each in gradients])
    answer = None
    if True in wants_gradient:
        peer, number = edge.key
        answer = edge.comm._edges.send(edge.comm, (peer, number + HIGHER_ORDER), edge.place)
    edge.comm._edges.answer(edge.comm, edge.key, gradients, edge.place, wants_gradient)
    return _make_sent(answer, *[g for g in gradients if g.requires_grad]) if answer else None


# What `Function.apply` does beside, for functorch's transforms, is a third of its time; and they can not send anyway.
_make_sent: Callable[..., Tensor] = super(torch.autograd.Function, _Sent).apply  # type: ignore[misc]
_make_received: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Received).apply  # type: ignore[misc]


def _visit(edge: Edge, operation: str) -> None:
    """Note that backward has come by."""
    edge.gone = None
    comm = edge.comm
    if comm._closed:
        comm._check_open(operation)
    edges = comm._edges
    if edges.unneeded or edges.forgotten or edges.lost_since_backward:
        edges.tend_after_backward(comm)
