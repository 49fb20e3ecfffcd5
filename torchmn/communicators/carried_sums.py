"""Reductions of small tensors, which go to every rank along with the comparison of arguments.

That comparison is a message to every rank anyway. In a training loop the same small reduction comes again and again:
what was checked the first time need not be worked out again, only compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchmn.communicators import checks, reductions, staging, wire

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator

ALIKE = ("dtype", "shape", "op")  # of the tensors of a reduction
_STRIDED = torch.strided
_MOST_REMEMBERED = 1000

Said = tuple[torch.dtype, torch.Size, str]


def again(comm: Communicator, x: Tensor, op: str, in_place: bool) -> Tensor | None:
    """The reduction of a tensor just like one that was carried before; None if there was none."""
    if type(x) is not Tensor or type(op) is not str or x.layout is not _STRIDED or x.is_nested:
        return None
    number = comm._carried_before.get((x.dtype, x.shape, op))
    if number is None or comm._aside is not None or comm._closed or comm._edges.unneeded:
        return None
    settings = comm.settings
    if not settings.checks or x.nbytes > settings.max_message_bytes:  # changed since then
        return None
    if not x.is_cpu or not x.is_contiguous() or x.requires_grad or x.is_neg() or x.is_conj():
        return None
    if not wire.address(x) or forward_ad._current_level >= 0 or (in_place and x.is_inference()):
        return None
    comm._collectives += 1
    if not comm._same_everywhere_carrying(number, x):
        comm._compare_statements("allreduce", None, ALIKE, (x.dtype, x.shape, op), None)
    return _reduced(comm, x, x, op, in_place)


def may_be(comm: Communicator, x: Tensor) -> bool:
    """Whether `x` goes with the comparison; the same on ranks that agree."""
    settings = comm.settings
    small = 0 < x.nbytes <= min(comm.carried_bytes, settings.max_message_bytes)
    return small and settings.checks and x.dtype in reductions.REDUCED_BY_TORCH


def first(comm: Communicator, x: Tensor, said: Said, in_place: bool) -> Tensor:
    """The reduction of `x`, whose arguments are known to be right on this rank."""
    carried = comm._outgoing(x)
    carried = staging.to_host(carried) if carried.is_cuda else carried
    comm._meet("allreduce", None, ALIKE, said, carried=carried)
    if len(comm._carried_before) >= _MOST_REMEMBERED:
        comm._carried_before.clear()  # shapes that never repeat must not fill the memory
    comm._carried_before[said] = checks.fingerprint(("allreduce", said, None))
    return _reduced(comm, x, carried, said[2], in_place)


def _reduced(comm: Communicator, x: Tensor, carried: Tensor, op: str, in_place: bool) -> Tensor:
    """The agreed reduction of `x`, which went to all ranks with the agreement as `carried`."""
    parts = comm._carried_parts(carried)
    if op == "sum" and carried is x and comm.size == 2:  # the shortest way: the sum of two numbers has no order
        return x.add_(parts[1 - comm.rank]) if in_place else torch.add(parts[0], parts[1])
    operation = "sum" if op == "mean" else op
    overwrite = in_place and carried.data_ptr() == x.data_ptr()
    if overwrite:
        reductions.reduce_into(carried, parts, operation)
    total = carried if overwrite else reductions.reduce_in_order(parts, operation)
    if op == "mean":
        total.mul_(1 / comm.size)
    if not in_place:
        return comm._arrived(total, x)
    if not overwrite:
        x.detach().copy_(total)
    return x
