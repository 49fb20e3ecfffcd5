"""Sending as a step of the computation: the gradient comes back from the rank that received.

Differentiable with respect to every floating-point tensor that is sent. The adjoint of sending is receiving.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from torchmn.communicators import checks
from torchmn.communicators.base import Communicator
from torchmn.communicators.edges import place_of_caller
from torchmn.communicators.uncompiled import uncompiled
from torchmn.communicators.wire import Kind, Message
from torchmn.functions import recomputation
from torchmn.functions.point_to_point import delegate_of, no_communicator

_current_backward = torch._C._current_graph_task_id


@uncompiled
def send(x: Tensor | Sequence[Tensor], comm: Communicator, rank: int, tag: int = 0) -> Tensor:
    """A delegate for what was sent: a 0-d float tensor, zero, through which backward finds its way to `x`.

    `x` is a tensor, or a tuple or list of them, for `recv` on `rank`. Like `comm.send` this does not wait. The
    delegate must take part in this rank's backward: `phi.backward()`, `(loss + phi).backward()`,
    `recv(..., delegate_variable=phi)` or `pseudo_connect(phi, y)`. Its backward waits for the gradient from `rank`;
    if it is forgotten and a gradient comes, a `DelegateError` names the two lines.
    """
    try:
        check = comm._check_peer
    except AttributeError:
        raise no_communicator("F.send(x, comm, rank)", comm, {"x": x, "rank": rank}) from None
    check("send", "rank", rank, tag)
    if _current_backward() != -1:  # inside of a backward
        recomputation.check_replaying(comm, "send")
        return torch.zeros((), requires_grad=is_grad_enabled(), device="cpu")
    edges = comm._edges
    if edges.unneeded or edges.forgotten or edges.lost:
        edges.tend(comm)
    with_gradients = is_grad_enabled()
    if with_gradients and isinstance(x, Tensor) and x.requires_grad:
        # The common case: send first, the rest while the message is on its way.
        number = edges.next_number(rank)
        if comm._send_at_once(x, rank, tag, number, True):
            return delegate_of(comm, (rank, number), place_of_caller(tag, sys._getframe(2)), x)
    many = isinstance(x, list | tuple)
    tensors: Any = x if many else (x,)
    for item in tensors:
        problem = checks.tensor_problem(item)
        if problem:
            comm._refuse_to_send("send", rank, tag, f"{problem} (for other objects: comm.send_obj)")
    kind = Kind.TUPLE if many else Kind.TENSOR
    wants_gradient = tuple([with_gradients and item.requires_grad for item in tensors])
    if True not in wants_gradient:
        if many or not comm._send_at_once(tensors[0], rank, tag):
            comm._send_message(Message(kind, tuple(tensors)), rank, tag)
        # Of values that need no gradient, too, a delegate on which every rank can call backward.
        return torch.zeros((), requires_grad=with_gradients, device="cpu")
    number = edges.next_number(rank)
    comm._send_message(Message(kind, tuple(tensors), number, wants_gradient), rank, tag)
    place = place_of_caller(tag, sys._getframe(2))
    return delegate_of(comm, (rank, number), place, *[item for item in tensors if item.requires_grad])
