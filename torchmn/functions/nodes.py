"""The autograd nodes of `send` and `recv`. Each is the adjoint of the other.

If backward is itself differentiated (`create_graph=True`), the gradient is sent by the same two nodes: the reply to an
edge is then an edge, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from torchmn._torch_compat import Function, fast_apply
from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.wire import Kind, Message
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.functions.edges import HIGHER_ORDER, Edge
from torchmn.other_spellings import adapted

ANCHOR = torch.zeros((), requires_grad=True, device="cpu")
"""An input of nodes that makes autograd visit them. They return no gradient for it."""

_ZERO = torch.zeros((), device="cpu")


def other_communicator(call: str, given: object, others: dict[str, object]) -> Communicator:
    """Returns the communicator for one of another library; raises an ArgumentError for anything else.

    Args:
        call: how to call the function.
        given: what was passed as communicator.
        others: the other arguments by name, one of which may be the communicator.
    """
    adapted_comm = adapted(given)
    if adapted_comm is not None:
        return adapted_comm
    found = next(((name, other) for name, other in others.items() if isinstance(other, Communicator)), None)
    who, advice = "", ""
    if found is not None:
        name, comm = found
        who = f"rank {comm.rank} of {comm.size}: "
        advice = f", and a communicator as {name}: put them in that order"
    raise ArgumentError(f"{who}expected comm to be a communicator, as in {call}, got {describe(given)}{advice}")


class _Sent(Function):
    """The node of tensors that were sent and need a gradient; its output is the delegate."""

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
        edges.poll_after_backward()
        in_graph = is_grad_enabled()
        message = edges.await_reply(edge.key, "backward of send", edge.place)
        gradients = message.tensors
        if not gradients:  # its receiver did not use it
            return (None,) * len(ctx.needs_input_grad)
        if in_graph:
            gradients = _gradients_in_graph(message, edge, delegates_gradient)
        return (None, *gradients)


Arrival = tuple[Message, Edge | None]
"""A message, and its edge if the sender needs a gradient."""


def receive_in_graph(receive: Callable[[], Arrival], delegate: Tensor | None) -> Any:
    """Returns the tensor or tuple that `receive` waits for, as part of this rank's graph, with the delegate as input.

    The node is created before the wait, so that little is left to do when the message arrives. Grad mode must be on.
    """
    return _apply_received(delegate if delegate is not None and delegate.requires_grad else ANCHOR, receive)


def _gradients_in_graph(message: Message, edge: Edge, delegate: Tensor | None) -> tuple[Tensor, ...]:
    """Returns the reply to an edge as part of the graph of a backward that is itself differentiated."""
    reply_edge = None
    if True in message.wants_reply:
        peer, number = edge.key
        reply_edge = edge.edges.receive((peer, number + HIGHER_ORDER), edge.place)
    message.kind = Kind.TUPLE
    return receive_in_graph(lambda: (message, reply_edge), delegate)


class _Received(Function):
    """The node of received tensors, whose input is the delegate."""

    @staticmethod
    def forward(ctx: Any, delegate: Tensor, receive: Callable[[], Arrival]) -> Tensor | tuple[Tensor, ...]:
        message, edge = receive()
        # Setting an attribute of a node costs half as much as a message's header: set one only for a single tensor.
        ctx.edge = edge
        if delegate is not ANCHOR or len(message.tensors) > 1:
            ctx.delegate = None if delegate is ANCHOR else (delegate.shape, delegate.dtype)
            ctx.wants_gradient = message.wants_reply
        return message.payload()

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd visits the delegate's node although its gradient is None.
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
            phi = _reply_with_edge(edge, gradients)
        else:
            edges.reply(edge.key, gradients, edge.place)
        edges.poll_after_backward()  # after the reply, for which the sender waits
        delegate = None if phi is None else getattr(ctx, "delegate", None)
        if phi is None or delegate is None:
            return None, None
        # The gradient of what was just sent reaches this rank through the delegate's gradient.
        shape, dtype = delegate
        return phi.to(dtype).expand(shape), None


def _reply_with_edge(edge: Edge, gradients: tuple[Tensor, ...]) -> Tensor | None:
    """Sends gradients that may need a gradient themselves; returns the delegate if one does."""
    wants_gradient = tuple([each.requires_grad for each in gradients])
    reply_edge = None
    if True in wants_gradient:
        peer, number = edge.key
        reply_edge = edge.edges.send((peer, number + HIGHER_ORDER), edge.place)
    edge.edges.reply(edge.key, gradients, edge.place, wants_gradient)
    return delegate_of(reply_edge, *[g for g in gradients if g.requires_grad]) if reply_edge else None


# Functorch's transforms cannot send, so their support in `apply` is not needed.
delegate_of: Callable[..., Tensor] = fast_apply(_Sent)
"""`delegate_of(edge, *tensors)`: the delegate of tensors that were sent on that edge and need their gradients."""
_apply_received: Callable[..., Any] = fast_apply(_Received)
