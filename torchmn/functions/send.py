"""Differentiable send: backward receives the gradient from the rank that received the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from torchmn._torch_compat import current_backward
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.watchdog.source_lines import user_instruction
from torchmn.compile_boundary import uncompiled
from torchmn.functions import recomputation
from torchmn.functions.edges import edges_of
from torchmn.functions.nodes import delegate_of, other_communicator


@uncompiled
def send(x: Tensor | Sequence[Tensor], comm: Communicator, rank: int, tag: int = 0) -> Tensor:
    """Sends tensors to another rank, and returns a delegate through which backward reaches them.

    Differentiable with respect to every floating-point tensor that is sent. The adjoint of sending is receiving: the
    delegate's backward waits for the gradient from `rank`. The delegate must be part of this rank's backward:
    `phi.backward()`, `(loss + phi).backward()`, `recv(..., delegate_variable=phi)` or `pseudo_connect(phi, y)`. If it
    is forgotten and a gradient comes, a `DelegateError` names the two source lines.

    Args:
        x: a tensor, or a tuple or list of tensors.
        comm: communicator of both ranks.
        rank: rank that calls `recv`.
        tag: number that `recv` must pass, too.

    Returns:
        The delegate, a 0-d float tensor of value zero. Like `comm.send`, this does not wait for the receiver.

    Raises:
        ArgumentError: if `x` cannot be sent, or for a wrong rank or tag.
    """
    given: Any = comm
    if not isinstance(given, Communicator):
        comm = other_communicator("F.send(x, comm, rank)", comm, {"x": x, "rank": rank})
    comm.replies.check_peer("send", "rank", rank, tag)
    if current_backward() != -1:
        recomputation.check_replaying(comm, "send")
        return torch.zeros((), requires_grad=is_grad_enabled(), device="cpu")
    edges = edges_of(comm)
    edges.poll()
    grad_enabled = is_grad_enabled()
    tensors: Sequence[Any] = x if isinstance(x, list | tuple) else (x,)
    # `replies.send` refuses objects that are not tensors, here and on the rank that waits for them.
    needing = [each for each in tensors if isinstance(each, Tensor) and each.requires_grad] if grad_enabled else []
    if not needing:
        comm.replies.send(x, rank, tag)
        # Every rank can call backward on its delegate, also if the values need no gradient.
        return torch.zeros((), requires_grad=grad_enabled, device="cpu")
    number = edges.next_number(rank)
    wants_gradient = tuple([isinstance(each, Tensor) and each.requires_grad for each in tensors])
    comm.replies.send(x, rank, tag, number, wants_gradient)
    return delegate_of(edges.send((rank, number), (tag, *user_instruction(depth=3))), *needing)
