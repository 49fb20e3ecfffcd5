"""Receiving as a step of the computation: backward sends the gradient to the rank that sent the value.

Differentiable with respect to what the sender sent, wherever it needs a gradient. The adjoint of receiving is sending.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from torchmn._torch_compat import current_backward
from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.wire import Kind, Message
from torchmn.communicators.watchdog.waits import user_instruction
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError, TorchMNError
from torchmn.functions import recomputation
from torchmn.functions.edges import Place, edges_of
from torchmn.functions.nodes import Arrival, no_communicator, received_from


@uncompiled
def recv(
    comm: Communicator, rank: int, delegate_variable: Tensor | None = None, tag: int = 0, force_tuple: bool = False
) -> Any:
    """What `rank` has sent with this `tag`: a tensor, or a tuple if a tuple or list was sent (or `force_tuple`).

    `delegate_variable` is what an earlier `send` of this rank returned: backward visits it after this `recv`.
    Values whose sender needs no gradient need none here, unless they carry a delegate; integers and bools carry none.
    Of a tuple, values that the loss does not depend on get a gradient of zeros; so does a value that is thrown away,
    or was received under `torch.no_grad`.
    """
    if not isinstance(comm, Communicator):
        others: dict[str, object] = {"rank": rank, "delegate_variable": delegate_variable}
        raise no_communicator("F.recv(comm, rank)", comm, others)
    comm.replies.check_peer("recv", "rank", rank, tag)
    if delegate_variable is not None and not isinstance(delegate_variable, Tensor):
        raise ArgumentError(
            f"rank {comm.rank} of {comm.size}: recv: expected delegate_variable to be the tensor that send returned, "
            f"or None, got {describe(delegate_variable)}"
        )
    if current_backward() != -1:  # inside of a backward
        recomputation.check_replaying(comm, "recv")
        received = _received_again(comm, rank, tag, delegate_variable)
    elif is_grad_enabled():
        place = (tag, *user_instruction(depth=3))
        received = received_from(lambda: _arrived(comm, rank, tag, place), delegate_variable)
    else:
        message = _next_message(comm, rank, tag)
        if message.request:
            comm.replies.declined.append((rank, message.request))
        received = message.payload()
    return (received,) if force_tuple and isinstance(received, Tensor) else received


def _arrived(comm: Communicator, rank: int, tag: int, place: Place) -> Arrival:
    """The next message from that rank, and the edge that it makes at this place, if there is one."""
    message = _next_message(comm, rank, tag)
    if True not in message.wants_reply:
        return message, None
    return message, edges_of(comm).receive((rank, message.request), place)


def _next_message(comm: Communicator, rank: int, tag: int) -> Message:
    """The next message of tensors; on this occasion, look after edges that backward cannot reach."""
    message = comm.replies.receive(rank, tag)
    if recomputation.keeping():
        recomputation.record(_described(comm, rank, tag), message)
    edges_of(comm).tend()
    if message.kind == Kind.OBJECT:
        raise TorchMNError(
            f"rank {comm.rank} of {comm.size}: recv from rank {rank}, tag {tag}: expected tensors, got an object "
            "that was sent with send_obj: receive it with comm.recv_obj"
        )
    return message


def _described(comm: Communicator, rank: int, tag: int) -> str:
    return f"a message from rank {rank} of {comm.name}, tag {tag}"


def _received_again(comm: Communicator, rank: int, tag: int, delegate: Tensor | None) -> Any:
    """What forward received at this place. Forward's node answers it: here it only needs a gradient as it did there."""
    message = recomputation.replay(comm, _described(comm, rank, tag))
    if not is_grad_enabled():
        return message.payload()
    if message.request:
        delegate = torch.zeros((), requires_grad=True, device="cpu")
    return received_from(lambda: (message, None), delegate)
