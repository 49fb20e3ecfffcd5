"""Differentiable broadcast: the tensor of one rank, on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import Function
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.collective import Call, needs_gradient, tensors_in, zero_gradients
from torchmn.functions.nodes import ANCHOR


@uncompiled
def bcast(comm: Communicator, x: Tensor | None, root: int = 0) -> Tensor:
    """Returns the tensor of rank `root`, on every rank.

    Differentiable with respect to the root's `x`. The adjoint is the sum of the gradients of all ranks, on the root:
    each rank's backward must reach the result.

    Args:
        comm: communicator whose ranks take part; all of them must call.
        x: on `root`, the tensor. On the other ranks its value is ignored and it may be None; if it is a tensor, such
            as the delegate that `gather` or `send` returned, backward continues to it.
        root: rank that has the tensor.

    Returns:
        A tensor of the shape and dtype of the root's `x`.

    Raises:
        MismatchError: on every rank, if `root` differs or a rank calls another operation.
    """
    return _run_bcast(Call.new(comm), x, root)


def _run_bcast(call: Call, x: Tensor | None, root: int) -> Tensor:
    is_root = call.comm.rank == root
    value, in_graph = call.perform(needs_gradient(x), lambda: call.comm.bcast(x if is_root else None, root))
    if is_root:
        value = value.clone()  # the communicator returns `x` itself
    return _Bcast.apply(ANCHOR, (value,), call, root, *tensors_in(x)) if in_graph else value


class _Bcast(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: tuple[Tensor], call: Call, root: int, *inputs: Tensor) -> Tensor:
        ctx.call, ctx.root = call, root
        ctx.inputs = [x.detach() for x in inputs]
        return value[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = _run_reduce(ctx.call.backward(), gradient, ctx.root)
        if ctx.call.comm.rank == ctx.root:
            return None, None, None, None, total
        return (None,) * 4 + zero_gradients(total, ctx.inputs)


def _run_reduce(call: Call, x: Tensor, root: int) -> Tensor:
    """Returns the sum over ranks on `root`, a delegate on the others."""
    total, in_graph = call.perform(needs_gradient(x), lambda: call.comm.allreduce(x))
    if call.comm.rank != root:
        total = torch.zeros((), device="cpu")
    return _Reduce.apply(ANCHOR, x, (total,), call, root) if in_graph else total


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, total: tuple[Tensor], call: Call, root: int) -> Tensor:
        ctx.call, ctx.root = call, root
        return total[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, _run_bcast(ctx.call.backward(), gradient, ctx.root), None, None, None
