"""Everybody's tensor for everybody, as a step of the computation.

Differentiable with respect to every rank's `x`: its gradient is the sum of what all ranks did with it. The adjoint of
gathering for all is `reduce_scatter`, which is this one's adjoint in turn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.collective import Call, needs_gradient
from torchmn.functions.nodes import ANCHOR


@uncompiled
def allgather(comm: Communicator, x: Tensor) -> tuple[Tensor, ...]:
    """Every rank's tensor in rank order, on every rank; shapes may differ, dtypes not.

    Each rank's backward must reach at least one of them; the others get zeros.
    """
    return allgather_in(Call.new(comm), x)


def allgather_in(call: Call, x: Tensor) -> tuple[Tensor, ...]:
    parts, joins = call.perform(needs_gradient(x), lambda: call.comm.allgather(x))
    # Parts of one buffer: as tensors of their own, changing one in place is no change of the others.
    parts = tuple([part.data for part in parts])
    return _AllGather.apply(ANCHOR, x, parts, call) if joins else parts  # type: ignore[return-value]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, parts: tuple[Tensor, ...], call: Call) -> tuple[Tensor, ...]:
        ctx.call = call
        return parts

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from torchmn.functions.reduce_scatter import reduce_scatter_in  # which needs this file for its own adjoint

        return None, reduce_scatter_in(ctx.call.backward(), gradients, "sum"), None, None
