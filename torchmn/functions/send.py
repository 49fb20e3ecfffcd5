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
from torchmn.communicators.edges import Place
from torchmn.functions import recomputation
from torchmn.functions.anchor import ANCHOR
from torchmn.functions.point_to_point import Send, post


def send(x: Tensor | Sequence[Tensor], comm: Communicator, rank: int, tag: int = 0) -> Tensor:
    """A delegate for what was sent: a 0-d float tensor, zero, through which backward finds its way to `x`.

    `x` is a tensor, or a tuple or list of them, for `recv` on `rank`. Like `comm.send` this does not wait. The
    delegate must take part in this rank's backward: `phi.backward()`, `(loss + phi).backward()`,
    `recv(..., delegate_variable=phi)` or `pseudo_connect(phi, y)`. Its backward waits for the gradient from `rank`;
    if it is forgotten and a gradient comes, a `DelegateError` names the two lines.
    """
    comm._check_peer("send", "rank", rank, tag)
    many = isinstance(x, list | tuple)
    tensors: Any = x if many else (x,)
    for item in tensors:
        problem = checks.tensor_problem(item)
        if problem:
            comm._refuse_to_send("send", rank, tag, f"{problem} (for other objects: comm.send_obj)")
    if recomputation.replays(comm, "send"):
        return torch.zeros((), requires_grad=torch.is_grad_enabled())
    edges = comm._edges
    if edges.unneeded or edges.forgotten or edges.lost:
        edges.tend(comm)
    if not torch.is_grad_enabled():
        post(comm, many, tensors, rank, tag)
        return torch.zeros(())
    # The anchor makes a delegate that needs a gradient of anything, so that every rank can call backward on it.
    return Send.apply(ANCHOR, comm, rank, Place.of_caller(tag, sys._getframe(1)), many, *tensors)  # type: ignore[return-value]
