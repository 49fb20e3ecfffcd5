"""The sum over ranks as a step of the computation.

Differentiable with respect to every rank's `x`. The adjoint of a sum that all ranks get is the same sum of gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.allgather import allgather
from torchmn.functions.collective import OF_ALL_VALUES, Call, needs_gradient
from torchmn.functions.nodes import ANCHOR


@uncompiled
def allreduce(comm: Communicator, x: Tensor, op: str = "sum") -> Tensor:
    """The sum (or mean, max, min, prod) of all ranks' tensors, element by element, on every rank.

    Shapes and dtypes must be equal. Where several ranks have the maximum, its gradient is divided between them; max,
    min and prod gather all values where a gradient is needed.
    """
    return _allreduce(Call.new(comm), x, op)


def _allreduce(call: Call, x: Tensor, op: str) -> Tensor:
    total, joins = call.perform(needs_gradient(x), lambda: call.comm.allreduce(x, op))
    if not joins:
        return total
    if op in OF_ALL_VALUES:
        return OF_ALL_VALUES[op](torch.stack(allgather(call.comm, x)))
    return _AllReduce.apply(ANCHOR, x, (total,), call, op)  # type: ignore[return-value]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, total: tuple[Tensor], call: Call, op: str) -> Tensor:
        ctx.call, ctx.op = call, op
        return total[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, _allreduce(ctx.call.backward(), gradient, ctx.op), None, None, None
