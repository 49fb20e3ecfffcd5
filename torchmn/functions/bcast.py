"""One rank's tensor for everybody, as a step of the computation.

Differentiable with respect to the root's `x`: its gradient is the sum of what all ranks did with it. The adjoint is
that sum, for the root alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.collective import Call, as_gradient_of, needs_gradient, tensors_in
from torchmn.functions.nodes import ANCHOR


@uncompiled
def bcast(comm: Communicator, x: Tensor | None, root: int = 0) -> Tensor:
    """The tensor of rank `root`, on every rank. Each rank's backward must reach it.

    On the other ranks the value of `x` is ignored, and it may be None. If it is a tensor, such as the delegate that
    `gather` or `send` returned, backward goes on to it: so a graph like gather, then bcast, stays in one piece.
    """
    return _bcast(Call.new(comm), x, root)


def _bcast(call: Call, x: Tensor | None, root: int) -> Tensor:
    here = call.comm.rank == root
    value, joins = call.perform(needs_gradient(x), lambda: call.comm.bcast(x if here else None, root))
    if here:
        value = value.clone()  # the communicator returns the root's own memory
    return _Bcast.apply(ANCHOR, (value,), call, root, *tensors_in(x)) if joins else value  # type: ignore[return-value]


class _Bcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: tuple[Tensor], call: Call, root: int, *inputs: Tensor) -> Tensor:
        ctx.call, ctx.root = call, root
        ctx.inputs = [x.detach() for x in inputs]
        return value[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = _sum_for(ctx.call.backward(), gradient, ctx.root)
        if ctx.call.comm.rank == ctx.root:
            return None, None, None, None, total
        return (None,) * 4 + as_gradient_of(total, tuple(ctx.inputs))


def _sum_for(call: Call, x: Tensor, root: int) -> Tensor:
    """On `root` the sum of all ranks' tensors; a delegate on the others."""
    total, joins = call.perform(needs_gradient(x), lambda: call.comm.allreduce(x))
    if call.comm.rank != root:
        total = torch.zeros((), device="cpu")
    return _SumFor.apply(ANCHOR, x, (total,), call, root) if joins else total  # type: ignore[return-value]


class _SumFor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, total: tuple[Tensor], call: Call, root: int) -> Tensor:
        ctx.call, ctx.root = call, root
        return total[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, _bcast(ctx.call.backward(), gradient, ctx.root), None, None, None
