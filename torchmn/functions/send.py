"""Sending as a step of the computation: the gradient comes back from the rank that received.

Differentiable with respect to every floating-point tensor that is sent. The adjoint of sending is receiving.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, is_grad_enabled

from torchmn._torch_compat import current_backward
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.watchdog.waits import user_instruction
from torchmn.compile_boundary import uncompiled
from torchmn.functions import recomputation
from torchmn.functions.edges import edges_of
from torchmn.functions.nodes import delegate_of, no_communicator


@uncompiled
def send(x: Tensor | Sequence[Tensor], comm: Communicator, rank: int, tag: int = 0) -> Tensor:
    """A delegate for what was sent: a 0-d float tensor, zero, through which backward finds its way to `x`.

    `x` is a tensor, or a tuple or list of them, for `recv` on `rank`. Like `comm.send` this does not wait. The
    delegate must take part in this rank's backward: `phi.backward()`, `(loss + phi).backward()`,
    `recv(..., delegate_variable=phi)` or `pseudo_connect(phi, y)`. Its backward waits for the gradient from `rank`;
    if it is forgotten and a gradient comes, a `DelegateError` names the two lines.
    """
    if not isinstance(comm, Communicator):
        raise no_communicator("F.send(x, comm, rank)", comm, {"x": x, "rank": rank})
    comm.replies.check_peer("send", "rank", rank, tag)
    if current_backward() != -1:  # inside of a backward
        recomputation.check_replaying(comm, "send")
        return torch.zeros((), requires_grad=is_grad_enabled(), device="cpu")
    edges = edges_of(comm)
    edges.tend()
    with_gradients = is_grad_enabled()
    tensors = x if isinstance(x, list | tuple) else (x,)
    # Other objects than tensors are refused by `replies.send`, here and on the rank that waits for them.
    wanting = [each for each in tensors if isinstance(each, Tensor) and each.requires_grad] if with_gradients else []
    if not wanting:
        comm.replies.send(x, rank, tag)
        # Of values that need no gradient, too, a delegate on which every rank can call backward.
        return torch.zeros((), requires_grad=with_gradients, device="cpu")
    number = edges.next_number(rank)
    wants_gradient = tuple([isinstance(each, Tensor) and each.requires_grad for each in tensors])
    comm.replies.send(x, rank, tag, number, wants_gradient)
    return delegate_of(edges.send((rank, number), (tag, *user_instruction(depth=3))), *wanting)
