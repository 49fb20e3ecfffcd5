"""Sending as a step of the computation: the gradient comes back from the rank that received.

Differentiable with respect to every floating-point tensor that is sent. The adjoint of sending is receiving.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from torchmn.communicators import checks
from torchmn.communicators.base import Communicator
from torchmn.communicators.edges import place_of_caller
from torchmn.functions import recomputation
from torchmn.functions.point_to_point import post, post_edge, post_edge_of_many


def send(x: Tensor | Sequence[Tensor], comm: Communicator, rank: int, tag: int = 0) -> Tensor:
    """A delegate for what was sent: a 0-d float tensor, zero, through which backward finds its way to `x`.

    `x` is a tensor, or a tuple or list of them, for `recv` on `rank`. Like `comm.send` this does not wait. The
    delegate must take part in this rank's backward: `phi.backward()`, `(loss + phi).backward()`,
    `recv(..., delegate_variable=phi)` or `pseudo_connect(phi, y)`. Its backward waits for the gradient from `rank`;
    if it is forgotten and a gradient comes, a `DelegateError` names the two lines.
    """
    comm._check_peer("send", "rank", rank, tag)
    if torch._C._current_graph_task_id() != -1:  # inside of a backward
        recomputation.check_replaying(comm, "send")
        return torch.zeros((), requires_grad=torch.is_grad_enabled())
    edges = comm._edges
    if edges.unneeded or edges.forgotten or edges.lost:
        edges.tend(comm)
    many = isinstance(x, list | tuple)
    for item in x if many else (x,):
        problem = checks.tensor_problem(item)
        if problem:
            comm._refuse_to_send("send", rank, tag, f"{problem} (for other objects: comm.send_obj)")
    with_gradients = torch.is_grad_enabled()
    if with_gradients and not many and x.requires_grad:  # type: ignore[union-attr]
        return post_edge(comm, x, rank, place_of_caller(tag, sys._getframe(1)))  # type: ignore[arg-type]
    if with_gradients and many and any(item.requires_grad for item in x):
        return post_edge_of_many(comm, x, rank, place_of_caller(tag, sys._getframe(1)))  # type: ignore[arg-type]
    post(comm, x, many, rank, tag)
    # Of values that need no gradient, too, a delegate on which every rank can call backward.
    return torch.zeros((), requires_grad=with_gradients)
