"""Differentiable reduce-scatter: sums over ranks, one for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import Function
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.allgather import run_allgather
from torchmn.functions.alltoall import alltoall
from torchmn.functions.collective import REDUCE_GATHERED, Call, as_sequence, needs_gradient
from torchmn.functions.nodes import ANCHOR


@uncompiled
def reduce_scatter(comm: Communicator, xs: Sequence[Tensor] | Tensor, op: str = "sum") -> Tensor:
    """Returns the sum (or mean, max, min, prod) over ranks of element `comm.rank` of their `xs`.

    Differentiable with respect to all of every rank's `xs`. The adjoint is `allgather`: each rank's backward must reach
    the result. If several ranks have the maximum, its gradient is divided between them.

    Args:
        comm: communicator whose ranks take part; all of them must call.
        xs: one tensor per rank, all of one dtype, or one tensor whose first dim is the number of ranks. Shapes may
            differ within `xs`, but not between ranks.
        op: "sum", "mean", "max", "min" or "prod".

    Returns:
        A tensor like `xs[comm.rank]`.

    Raises:
        MismatchError: on every rank, if shapes, dtypes or `op` differ or a rank calls another operation.
    """
    return run_reduce_scatter(Call.new(comm), as_sequence(xs, comm.size), op)


def run_reduce_scatter(call: Call, xs: Sequence[Tensor], op: str) -> Tensor:
    total, in_graph = call.perform(needs_gradient(xs), lambda: call.comm.reduce_scatter(xs, op))
    if not in_graph:
        return total
    if op in REDUCE_GATHERED:
        return REDUCE_GATHERED[op](torch.stack(alltoall(call.comm, xs)))
    return _ReduceScatter.apply(ANCHOR, (total,), call, op, *xs)


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, total: tuple[Tensor], call: Call, op: str, *xs: Tensor) -> Tensor:
        ctx.call, ctx.op = call, op
        return total[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.op == "mean":
            gradient = gradient / ctx.call.comm.size
        return (None,) * 4 + run_allgather(ctx.call.backward(), gradient)
