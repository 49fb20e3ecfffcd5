"""Differentiable receive: backward sends the gradient to the rank that sent the tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from torchmn._torch_compat import current_backward
from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.wire import Kind, Message
from torchmn.communicators.watchdog.source_lines import user_instruction
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError, TorchMNError
from torchmn.functions import recomputation
from torchmn.functions.edges import Place, edges_of
from torchmn.functions.nodes import Arrival, other_communicator, receive_in_graph


@uncompiled
def recv(
    comm: Communicator, rank: int, delegate_variable: Tensor | None = None, tag: int = 0, force_tuple: bool = False
) -> Any:
    """Receives what `rank` sent by `send` with this `tag`.

    Differentiable with respect to the sent tensors that need a gradient. The adjoint of receiving is sending: backward
    sends the gradients to `rank`. A value that the loss does not depend on gets a gradient of zeros, also if it is
    deleted or was received under `torch.no_grad`. A value whose sender needs no gradient can be part of a backward,
    too, which then sends nothing: `backward` may be called on every rank. Integers and bools have no gradient.

    Args:
        comm: communicator of both ranks.
        rank: rank that calls `send`.
        delegate_variable: what an earlier `send` of this rank returned: backward visits it after this `recv`.
        tag: number that `send` passes, too.
        force_tuple: return a tuple also if a single tensor was sent.

    Returns:
        A tensor, or a tuple of tensors if a tuple or list was sent.

    Raises:
        ArgumentError: for a wrong rank, tag or delegate.
        PeerError: if the sender raised an error instead of sending.
    """
    given: Any = comm
    if not isinstance(given, Communicator):
        others: dict[str, object] = {"rank": rank, "delegate_variable": delegate_variable}
        comm = other_communicator("F.recv(comm, rank)", comm, others)
    comm.replies.check_peer("recv", "rank", rank, tag)
    delegate: Any = delegate_variable
    if delegate is not None and not isinstance(delegate, Tensor):
        raise ArgumentError(
            f"rank {comm.rank} of {comm.size}: recv: expected delegate_variable to be the tensor that send returned, "
            f"or None, got {describe(delegate_variable)}"
        )
    if current_backward() != -1:
        recomputation.check_replaying(comm, "recv")
        received = _replay(comm, rank, tag, delegate_variable)
    elif is_grad_enabled():
        place = (tag, *user_instruction(depth=3))
        received = receive_in_graph(lambda: _receive_edge(comm, rank, tag, place), delegate_variable)
    else:
        message = _next_message(comm, rank, tag)
        if message.request:
            comm.replies.declined.append((rank, message.request))
        received = message.payload()
    return (received,) if force_tuple and isinstance(received, Tensor) else received


def _receive_edge(comm: Communicator, rank: int, tag: int, place: Place) -> Arrival:
    """Waits for the next message; returns it and its edge, if its sender needs a gradient."""
    message = _next_message(comm, rank, tag)
    if True not in message.wants_reply:
        return message, None
    return message, edges_of(comm).receive((rank, message.request), place)


def _next_message(comm: Communicator, rank: int, tag: int) -> Message:
    """Waits for the next message of tensors; also checks for gradients of forgotten edges."""
    message = comm.replies.receive(rank, tag)
    if recomputation.recording():
        recomputation.record(_described(comm, rank, tag), message)
    edges_of(comm).poll()
    if message.kind == Kind.OBJECT:
        raise TorchMNError(
            f"rank {comm.rank} of {comm.size}: recv from rank {rank}, tag {tag}: expected tensors, got an object "
            "that was sent with send_obj: receive it with comm.recv_obj"
        )
    return message


def _described(comm: Communicator, rank: int, tag: int) -> str:
    return f"a message from rank {rank} of {comm.name}, tag {tag}"


def _replay(comm: Communicator, rank: int, tag: int, delegate: Tensor | None) -> Any:
    """Returns what forward received here. Forward's node sends the gradient; this one only needs one as it did."""
    message = recomputation.replay(comm, _described(comm, rank, tag))
    if not is_grad_enabled():
        return message.payload()
    if message.request:
        delegate = torch.zeros((), requires_grad=True, device="cpu")
    return receive_in_graph(lambda: (message, None), delegate)
