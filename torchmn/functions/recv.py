"""Receiving as a step of the computation: backward sends the gradient to the rank that sent the value.

Differentiable with respect to what the sender sent, wherever it needs a gradient. The adjoint of receiving is sending.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.communicators.checks import describe
from torchmn.communicators.edges import Edge, Place
from torchmn.communicators.wire import Kind, Message
from torchmn.errors import ArgumentError, TorchMNError
from torchmn.functions.anchor import ANCHOR


def recv(
    comm: Communicator, rank: int, delegate_variable: Tensor | None = None, tag: int = 0, force_tuple: bool = False
) -> Any:
    """What `rank` has sent with this `tag`: a tensor, or a tuple if a tuple or list was sent (or `force_tuple`).

    `delegate_variable` is what an earlier `send` of this rank returned: backward visits it after this `recv`.
    Values whose sender needs no gradient need none here, unless they carry a delegate. Of a tuple, values that the
    loss does not depend on get a gradient of zeros; so does a value that is thrown away before backward.
    """
    comm._check_peer("recv", "rank", rank, tag)
    if delegate_variable is not None and not isinstance(delegate_variable, Tensor):
        raise ArgumentError(
            f"rank {comm.rank} of {comm.size}: recv: expected delegate_variable to be the tensor that send returned, "
            f"or None, got {describe(delegate_variable)}"
        )
    message = comm._recv_message(rank, tag)
    if message.kind == Kind.OBJECT:
        raise TorchMNError(
            f"rank {comm.rank} of {comm.size}: recv from rank {rank}, tag {tag}: expected tensors, got an object "
            "that was sent with send_obj: receive it with comm.recv_obj"
        )
    tensors = _joined(message, comm, rank, tag, delegate_variable)
    return tensors if force_tuple or message.kind == Kind.TUPLE else tensors[0]


def _joined(message: Message, comm: Communicator, source: int, tag: int, delegate: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors of a message as part of this rank's graph."""
    if not torch.is_grad_enabled():
        if message.edge:
            comm._edges.unneeded.append((source, message.edge))
        return message.tensors
    if not message.edge and (delegate is None or not delegate.requires_grad):
        return message.tensors
    edge = None
    if message.edge:
        edge = comm._edges.receive(source, message.edge, Place.of_caller(tag, sys._getframe(2)))
    return _Recv.apply(ANCHOR if delegate is None else delegate, comm, edge, message)  # type: ignore[return-value]


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, delegate: Tensor, comm: Communicator, edge: Edge | None, message: Message
    ) -> tuple[Tensor, ...]:
        ctx.comm, ctx.edge, ctx.wants_gradient = comm, edge, message.wants_gradient
        without = [x for x in message.tensors if not (x.is_floating_point() or x.is_complex())]
        if without:
            ctx.mark_non_differentiable(*without)
        return message.tensors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        edge: Edge | None = ctx.edge
        if edge is not None:
            edge.visited()
            wanted = tuple([g for g, wanted in zip(gradients, ctx.wants_gradient, strict=True) if wanted])
            ctx.comm._edges.answer(ctx.comm, edge.key, wanted)
        return (None,) * 4  # for the delegate too: autograd visits it all the same
