"""Differentiable all-reduce: the sum, mean, maximum, minimum or product over ranks, on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import Function
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.allgather import allgather
from torchmn.functions.collective import REDUCE_GATHERED, Call, needs_gradient
from torchmn.functions.nodes import ANCHOR


@uncompiled
def allreduce(comm: Communicator, x: Tensor, op: str = "sum") -> Tensor:
    """Returns the sum (or mean, max, min, prod) over ranks, element by element, on every rank.

    Differentiable with respect to every rank's `x`. The adjoint is the same sum, of the gradients: each rank's backward
    must reach the result. max, min and prod gather the tensors of all ranks if a gradient is needed; if several ranks
    have the maximum, its gradient is divided between them.

    Args:
        comm: communicator whose ranks take part; all of them must call.
        x: this rank's tensor, of the same shape and dtype on all ranks.
        op: "sum", "mean", "max", "min" or "prod".

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        MismatchError: on every rank, if shapes, dtypes or `op` differ or a rank calls another operation.
    """
    return _run_allreduce(Call.new(comm), x, op)


def _run_allreduce(call: Call, x: Tensor, op: str) -> Tensor:
    total, in_graph = call.perform(needs_gradient(x), lambda: call.comm.allreduce(x, op))
    if not in_graph:
        return total
    if op in REDUCE_GATHERED:
        return REDUCE_GATHERED[op](torch.stack(allgather(call.comm, x)))
    return _AllReduce.apply(ANCHOR, x, (total,), call, op)


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, total: tuple[Tensor], call: Call, op: str) -> Tensor:
        ctx.call, ctx.op = call, op
        return total[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, _run_allreduce(ctx.call.backward(), gradient, ctx.op), None, None, None
