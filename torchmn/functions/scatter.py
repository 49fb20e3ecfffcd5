"""Differentiable scatter: the tensors of one rank, one for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchmn._torch_compat import Function
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.collective import Call, as_sequence, needs_gradient, tensors_in, zero_gradients
from torchmn.functions.gather import run_gather
from torchmn.functions.nodes import ANCHOR


@uncompiled
def scatter(comm: Communicator, xs: Sequence[Tensor] | Tensor | None, root: int = 0) -> Tensor:
    """Returns element `comm.rank` of the tensors that rank `root` passes.

    Differentiable with respect to the root's `xs`. The adjoint is `gather`: each rank's backward must reach the result.

    Args:
        comm: communicator whose ranks take part; all of them must call.
        xs: on `root`, one tensor per rank, all of one dtype (shapes may differ), or one tensor whose first dim is the
            number of ranks. On the other ranks its values are ignored and it may be None; backward continues to tensors
            in it.
        root: rank that has the tensors.

    Returns:
        A tensor with the shape and dtype that `root` chose for this rank.

    Raises:
        MismatchError: on every rank, if `root` differs or a rank calls another operation.
    """
    return run_scatter(Call.new(comm), as_sequence(xs, comm.size) if comm.rank == root else xs, root)


def run_scatter(call: Call, xs: Any, root: int) -> Tensor:
    is_root = call.comm.rank == root
    part, in_graph = call.perform(needs_gradient(xs), lambda: call.comm.scatter(xs if is_root else None, root))
    return _Scatter.apply(ANCHOR, (part,), call, root, *tensors_in(xs)) if in_graph else part


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, part: tuple[Tensor], call: Call, root: int, *inputs: Tensor) -> Tensor:
        ctx.call, ctx.root = call, root
        ctx.inputs = [x.detach() for x in inputs] if call.comm.rank != root else []
        return part[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gathered = run_gather(ctx.call.backward(), gradient, ctx.root)
        if ctx.call.comm.rank == ctx.root:
            return (None,) * 4 + gathered
        return (None,) * 4 + zero_gradients(gathered, ctx.inputs)
