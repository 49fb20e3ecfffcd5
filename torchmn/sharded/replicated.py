"""Passing between values that every rank holds whole and values of which every rank holds a part.

The convention here is that of a model on a grid of ranks: a whole value is the same on every rank and counts once,
so its gradient is whole, too, and the same on every rank. (The other functions of this package follow the convention
that the loss is the sum over ranks of local losses.) Each of these functions is the adjoint of its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled

Gather = Callable[[Tensor], Tensor]


def enter_parts(x: Tensor, comm: Communicator) -> Tensor:
    """A whole value `x`, about to be used by every rank for its own part; its gradient is summed over ranks."""
    if comm.size == 1 or not x.requires_grad or not torch.is_grad_enabled():
        return x
    return _Enter.apply(x, comm)  # type: ignore[return-value]


def sum_of_parts(x: Tensor, comm: Communicator) -> Tensor:
    """The sum over ranks of what each made of its part: a whole value."""
    if comm.size == 1:
        return x
    return _Sum.apply(x, comm)  # type: ignore[return-value]


def whole_of_parts(x: Tensor, comm: Communicator, gather: Gather, take: Gather) -> Tensor:
    """The whole value of which each rank holds a part: `gather` fetches it, `take` cuts this rank's part out."""
    return _Move.apply(x, comm, gather, take)  # type: ignore[return-value]


def part_of_whole(x: Tensor, comm: Communicator, gather: Gather, take: Gather) -> Tensor:
    """This rank's part of a whole value; `gather` puts the gradient together from all ranks' parts."""
    return _Move.apply(x, comm, take, gather)  # type: ignore[return-value]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @uncompiled
    def backward(ctx, *gradients):
        return sum_of_parts(gradients[0], ctx.comm), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return torch.empty_like(x) if x.is_meta else comm.allreduce(x)

    @staticmethod
    @uncompiled
    def backward(ctx, *gradients):
        return enter_parts(gradients[0], ctx.comm), None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, there, back):
        ctx.comm, ctx.there, ctx.back = comm, there, back
        return there(x)

    @staticmethod
    @uncompiled
    def backward(ctx, *gradients):
        return _Move.apply(gradients[0], ctx.comm, ctx.back, ctx.there), None, None, None
