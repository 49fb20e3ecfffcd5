"""Differentiable all-gather: the tensors of all ranks, on all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchmn._torch_compat import Function
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.collective import Call, needs_gradient
from torchmn.functions.nodes import ANCHOR


@uncompiled
def allgather(comm: Communicator, x: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors of all ranks, in rank order.

    Differentiable with respect to every rank's `x`. The adjoint is `reduce_scatter`: the gradient of `x` is the sum of
    the gradients that all ranks have for it. Each rank's backward must reach at least one element of the result; the
    others get zeros.

    Args:
        comm: communicator whose ranks take part; all of them must call.
        x: this rank's tensor. Shapes may differ between ranks, dtypes may not.

    Returns:
        One tensor per rank.

    Raises:
        MismatchError: on every rank, if dtypes differ or a rank calls another operation.
    """
    return run_allgather(Call.new(comm), x)


def run_allgather(call: Call, x: Tensor) -> tuple[Tensor, ...]:
    parts, in_graph = call.perform(needs_gradient(x), lambda: call.comm.allgather(x))
    # They share a buffer. With `.data` they do not share a version counter: one may be changed in place.
    parts = tuple([part.data for part in parts])
    return _AllGather.apply(ANCHOR, x, parts, call) if in_graph else parts


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, parts: tuple[Tensor, ...], call: Call) -> tuple[Tensor, ...]:
        ctx.call = call
        return parts

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from torchmn.functions.reduce_scatter import run_reduce_scatter  # which imports this file for its adjoint

        return None, run_reduce_scatter(ctx.call.backward(), gradients, "sum"), None, None
