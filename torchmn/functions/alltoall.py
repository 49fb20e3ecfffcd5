"""Differentiable all-to-all: a tensor from every rank to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchmn._torch_compat import Function
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.collective import Call, as_sequence, needs_gradient
from torchmn.functions.nodes import ANCHOR


@uncompiled
def alltoall(comm: Communicator, xs: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
    """Returns one tensor from every rank, in rank order: from rank j, element `comm.rank` of its `xs`.

    Differentiable with respect to all of every rank's `xs`. The adjoint is `alltoall`, too: it returns the gradients to
    their ranks. Each rank's backward must reach at least one element of the result; the others get zeros.

    Args:
        comm: communicator whose ranks take part; all of them must call.
        xs: one tensor per rank, all of one dtype; shapes may differ. Or one tensor whose first dim is the number of
            ranks.

    Returns:
        One tensor per rank.

    Raises:
        MismatchError: on every rank, if dtypes differ or a rank calls another operation.
    """
    return _run_alltoall(Call.new(comm), as_sequence(xs, comm.size))


def _run_alltoall(call: Call, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    received, in_graph = call.perform(needs_gradient(xs), lambda: call.comm.alltoall(xs))
    return _AllToAll.apply(ANCHOR, received, call, *xs) if in_graph else received


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: tuple[Tensor, ...], call: Call, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return received

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None,) * 3 + _run_alltoall(ctx.call.backward(), gradients)
