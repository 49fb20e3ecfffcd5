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
from torchmn.communicators.edges import Place, place_of_caller
from torchmn.communicators.wire import Kind
from torchmn.errors import ArgumentError, TorchMNError
from torchmn.functions import recomputation
from torchmn.functions.point_to_point import Arrival, received_from


def recv(
    comm: Communicator, rank: int, delegate_variable: Tensor | None = None, tag: int = 0, force_tuple: bool = False
) -> Any:
    """What `rank` has sent with this `tag`: a tensor, or a tuple if a tuple or list was sent (or `force_tuple`).

    `delegate_variable` is what an earlier `send` of this rank returned: backward visits it after this `recv`.
    Values whose sender needs no gradient need none here, unless they carry a delegate; integers and bools carry none.
    Of a tuple, values that the loss does not depend on get a gradient of zeros; so does a value that is thrown away,
    or was received under `torch.no_grad`.
    """
    comm._check_peer("recv", "rank", rank, tag)
    if delegate_variable is not None and not isinstance(delegate_variable, Tensor):
        raise ArgumentError(
            f"rank {comm.rank} of {comm.size}: recv: expected delegate_variable to be the tensor that send returned, "
            f"or None, got {describe(delegate_variable)}"
        )
    if torch._C._current_graph_task_id() != -1:  # inside of a backward
        recomputation.check_replaying(comm, "recv")
        received = _received_again(delegate_variable)
    elif torch.is_grad_enabled():
        place = place_of_caller(tag, sys._getframe(1))
        received = received_from(lambda: _arrived(comm, rank, tag, place), delegate_variable)
    else:
        message, _ = _arrived(comm, rank, tag, None)
        if message.edge:
            comm._edges.unneeded.append((rank, message.edge))
        received = message.payload()
    return (received,) if force_tuple and isinstance(received, Tensor) else received


def _arrived(comm: Communicator, rank: int, tag: int, place: Place | None) -> Arrival:
    """The next message from that rank, and the edge that it makes at this place, if there is one."""
    message = comm._recv_message(rank, tag)
    recomputation.record(message)
    edges = comm._edges
    if edges.unneeded or edges.forgotten or edges.lost:
        edges.tend(comm)
    if message.kind == Kind.OBJECT:
        raise TorchMNError(
            f"rank {comm.rank} of {comm.size}: recv from rank {rank}, tag {tag}: expected tensors, got an object "
            "that was sent with send_obj: receive it with comm.recv_obj"
        )
    if place is None or True not in message.wants_gradient:
        return message, None
    return message, edges.receive(comm, (rank, message.edge), place)


def _received_again(delegate: Tensor | None) -> Any:
    """What forward received at this place. Forward's node answers it: here it only needs a gradient as it did there."""
    message = recomputation.replay()
    if not torch.is_grad_enabled():
        return message.payload()
    if message.edge:
        delegate = torch.zeros((), requires_grad=True)
    return received_from(lambda: (message, None), delegate)
