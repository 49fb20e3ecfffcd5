"""One rank's tensors, one for everybody, as a step of the computation.

Differentiable with respect to the root's `xs`. The adjoint is `gather`, which is this one's adjoint in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.collective import Call, as_gradient_of, needs_gradient, parts_of, tensors_in
from torchmn.functions.gather import gather_in
from torchmn.functions.nodes import ANCHOR


@uncompiled
def scatter(comm: Communicator, xs: Sequence[Tensor] | Tensor | None, root: int = 0) -> Tensor:
    """This rank's element of the tensors that `root` passes. Each rank's backward must reach it.

    `root` passes one tensor per rank, of one dtype (shapes may differ), or one tensor whose first dim is the number
    of ranks. On the other ranks the values of `xs` are ignored, and it may be None; backward goes on to tensors in it.
    """
    return scatter_in(Call.new(comm), parts_of(xs, comm.size) if comm.rank == root else xs, root)


def scatter_in(call: Call, xs: Any, root: int) -> Tensor:
    here = call.comm.rank == root
    mine, joins = call.perform(needs_gradient(xs), lambda: call.comm.scatter(xs if here else None, root))
    return _Scatter.apply(ANCHOR, (mine,), call, root, *tensors_in(xs)) if joins else mine  # type: ignore[return-value]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, mine: tuple[Tensor], call: Call, root: int, *inputs: Tensor) -> Tensor:
        ctx.call, ctx.root = call, root
        ctx.inputs = [x.detach() for x in inputs] if call.comm.rank != root else []
        return mine[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gathered = gather_in(ctx.call.backward(), gradient, ctx.root)
        if ctx.call.comm.rank == ctx.root:
            return (None,) * 4 + gathered
        return (None,) * 4 + as_gradient_of(gathered, tuple(ctx.inputs))
