"""Sums over ranks of which every rank gets one, as a step of the computation.

Differentiable with respect to all of every rank's `xs`. The adjoint is `allgather`, which is this one's adjoint in
turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.allgather import allgather_in
from torchmn.functions.alltoall import alltoall
from torchmn.functions.collective import OF_ALL_VALUES, Call, needs_gradient, parts_of
from torchmn.functions.nodes import ANCHOR


@uncompiled
def reduce_scatter(comm: Communicator, xs: Sequence[Tensor] | Tensor, op: str = "sum") -> Tensor:
    """The sum (or mean, max, min, prod) over ranks of the elements of `xs` that are at this rank.

    `xs` holds one tensor per rank, of one dtype (or is one tensor whose first dim is the number of ranks); the shapes
    in it may differ, but not between ranks. Where several ranks have the maximum, its gradient is divided.
    """
    return reduce_scatter_in(Call.new(comm), parts_of(xs, comm.size), op)


def reduce_scatter_in(call: Call, xs: Sequence[Tensor], op: str) -> Tensor:
    total, joins = call.perform(needs_gradient(xs), lambda: call.comm.reduce_scatter(xs, op))
    if not joins:
        return total
    if op in OF_ALL_VALUES:
        return OF_ALL_VALUES[op](torch.stack(alltoall(call.comm, xs)))
    return _ReduceScatter.apply(ANCHOR, (total,), call, op, *xs)  # type: ignore[return-value]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, total: tuple[Tensor], call: Call, op: str, *xs: Tensor) -> Tensor:
        ctx.call, ctx.op = call, op
        return total[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.op == "mean":
            gradient = gradient / ctx.call.comm.size
        return (None,) * 4 + allgather_in(ctx.call.backward(), gradient)
