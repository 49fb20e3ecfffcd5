"""The two nodes of autograd's graph that `send` and `recv` make. Each is the other one's adjoint.

When backward is itself to be differentiated (`create_graph=True`), the gradient travels by the same two nodes: the
answer to an edge is then an edge, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.wire import Kind, Message
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.functions.edges import HIGHER_ORDER, Edge

ANCHOR = torch.zeros((), requires_grad=True, device="cpu")
"""Nodes return no gradient for it; it only makes autograd visit them."""


def no_communicator(call: str, given: object, others: dict[str, object]) -> ArgumentError:
    """The error of a call like `call` that was given something else as its communicator; that may be in `others`."""
    swapped = next((name for name, other in others.items() if isinstance(other, Communicator)), None)
    comm: Any = others[swapped] if swapped else None
    who = f"rank {comm.rank} of {comm.size}: " if swapped else ""
    way_out = f", and a communicator as {swapped}: put them in that order" if swapped else ""
    return ArgumentError(f"{who}expected comm to be a communicator, as in {call}, got {describe(given)}{way_out}")


_ZERO = torch.zeros((), device="cpu")


class _Sent(torch.autograd.Function):
    """Stands for tensors that were sent and want a gradient; its output is the delegate."""

    @staticmethod
    def forward(ctx: Any, edge: Edge, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.edge = edge
        return torch.zeros_like(_ZERO)  # twice as fast as torch.zeros(())

    @staticmethod
    @uncompiled
    def backward(ctx: Any, delegates_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        edge: Edge = ctx.edge
        edge.visited = True
        edges = edge.edges
        edges.comm.replies.check_open("backward of send")
        edges.tend_after_backward()
        in_graph = is_grad_enabled()
        message = edges.await_answer(edge.key, "backward of send", edge.place)
        gradients = message.tensors
        if not gradients:  # its receiver did not use it
            return (None,) * len(ctx.needs_input_grad)
        if in_graph:
            gradients = _gradients_in_graph(message, edge, delegates_gradient)
        return (None, *gradients)


Arrival = tuple[Message, Edge | None]
"""A message, and the edge on which it came if its sender wants a gradient."""


def received_from(arrive: Callable[[], Arrival], delegate: Tensor | None) -> Any:
    """The tensor or tuple that `arrive` waits for, as part of this rank's graph, behind it the delegate.

    The node is begun before the wait, so that little is left to do once the message is there. Grad mode is on.
    """
    return _make_received(delegate if delegate is not None and delegate.requires_grad else ANCHOR, arrive)


def _gradients_in_graph(message: Message, edge: Edge, delegate: Tensor | None) -> tuple[Tensor, ...]:
    """The answer to an edge as part of the graph of a backward that is itself differentiated."""
    answer = None
    if True in message.wants_reply:
        peer, number = edge.key
        answer = edge.edges.receive((peer, number + HIGHER_ORDER), edge.place)
    message.kind = Kind.TUPLE
    return received_from(lambda: (message, answer), delegate)


class _Received(torch.autograd.Function):
    """Puts what has been received into the graph, behind it the delegate."""

    @staticmethod
    def forward(ctx: Any, delegate: Tensor, arrive: Callable[[], Arrival]) -> Tensor | tuple[Tensor, ...]:
        message, edge = arrive()
        # Each attribute of a node costs as much as half a message's header: one will do where there is one tensor.
        ctx.edge = edge
        if delegate is ANCHOR and edge is None:
            ctx.mark_non_differentiable(*message.tensors)
        elif delegate is not ANCHOR or len(message.tensors) > 1:
            ctx.delegate = None if delegate is ANCHOR else (delegate.shape, delegate.dtype)
            ctx.wants_gradient = message.wants_reply
        return message.payload()

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # No gradient for the delegate: autograd visits it all the same.
        edge: Edge | None = ctx.edge
        if edge is None:
            return None, None
        edge.visited = True
        edges = edge.edges
        edges.comm.replies.check_open("backward of recv")
        if len(gradients) > 1:
            wants = ctx.wants_gradient
            gradients = tuple([gradient for gradient, wanted in zip(gradients, wants, strict=True) if wanted])
        phi = None
        if is_grad_enabled():
            phi = _answer_with_edge(edge, gradients)
        else:
            edges.answer(edge.key, gradients, edge.place)
        edges.tend_after_backward()  # only now: the sender waits
        delegate = None if phi is None else getattr(ctx, "delegate", None)
        if phi is None or delegate is None:
            return None, None
        # The way to the gradient of what was just sent is through the delegate's gradient.
        shape, dtype = delegate
        return phi.to(dtype).expand(shape), None


def _answer_with_edge(edge: Edge, gradients: tuple[Tensor, ...]) -> Tensor | None:
    """Send gradients that may want a gradient themselves; the delegate if one does."""
    wants_gradient = tuple([each.requires_grad for each in gradients])
    answer = None
    if True in wants_gradient:
        peer, number = edge.key
        answer = edge.edges.send((peer, number + HIGHER_ORDER), edge.place)
    edge.edges.answer(edge.key, gradients, edge.place, wants_gradient)
    return delegate_of(answer, *[g for g in gradients if g.requires_grad]) if answer else None


# What `Function.apply` does beside, for functorch's transforms, is a third of its time; and they can not send anyway.
delegate_of: Callable[..., Tensor] = super(torch.autograd.Function, _Sent).apply  # type: ignore[misc]
"""`delegate_of(edge, *tensors)`: the delegate of tensors that were sent on that edge and want their gradients."""
_make_received: Callable[..., Any] = super(torch.autograd.Function, _Received).apply  # type: ignore[misc]
