"""Differentiable collectives between replicated values, which every rank holds, and sharded ones.

Convention for gradients: a replicated value is the same on every rank and counts once, so its gradient is complete and
the same on every rank. (In `torchmn.functions` the loss is the sum of the losses of all ranks instead.) The functions
are pairwise adjoint: `enter_shards` and `sum_over_shards`, `gather_shards` and `take_shard`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled

Convert = Callable[[Tensor], Tensor]


def enter_shards(x: Tensor, comm: Communicator) -> Tensor:
    """Returns the replicated `x` for use with this rank's shard. Its gradient is summed over ranks in backward."""
    if comm.size == 1 or not x.requires_grad or not torch.is_grad_enabled():
        return x
    return _Enter.apply(x, comm)


def sum_over_shards(x: Tensor, comm: Communicator) -> Tensor:
    """Returns the sum of all ranks' `x`, a replicated value."""
    if comm.size == 1:
        return x
    return _Sum.apply(x, comm)


def gather_shards(x: Tensor, comm: Communicator, gather: Convert, take: Convert) -> Tensor:
    """Returns the replicated value of which `x` is this rank's shard.

    Args:
        gather: returns the whole value of a shard; communicates.
        take: returns this rank's shard of a whole value.
    """
    return _Redistribute.apply(x, comm, gather, take)


def take_shard(x: Tensor, comm: Communicator, gather: Convert, take: Convert) -> Tensor:
    """Returns this rank's shard of the replicated `x`. Arguments as for `gather_shards`."""
    return _Redistribute.apply(x, comm, take, gather)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @uncompiled
    def backward(ctx, *gradients):
        return sum_over_shards(gradients[0], ctx.comm), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return torch.empty_like(x) if x.is_meta else comm.allreduce(x)

    @staticmethod
    @uncompiled
    def backward(ctx, *gradients):
        return enter_shards(gradients[0], ctx.comm), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, convert, convert_back):
        ctx.comm, ctx.convert, ctx.convert_back = comm, convert, convert_back
        return convert(x)

    @staticmethod
    @uncompiled
    def backward(ctx, *gradients):
        return _Redistribute.apply(gradients[0], ctx.comm, ctx.convert_back, ctx.convert), None, None, None
