"""A tensor from every rank to every rank, as a step of the computation.

Differentiable with respect to all of every rank's `xs`. The adjoint brings the gradients back: it is `alltoall`, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.collective import Call, needs_gradient, parts_of
from torchmn.functions.nodes import ANCHOR


@uncompiled
def alltoall(comm: Communicator, xs: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
    """A tensor from every rank in rank order: from rank j, the element of its `xs` that is at this rank.

    `xs` holds one tensor per rank, all of one dtype (or is one tensor whose first dim is the number of ranks); shapes
    may differ. Each rank's backward must reach at least one of the results; the others get zeros.
    """
    return _alltoall(Call.new(comm), parts_of(xs, comm.size))


def _alltoall(call: Call, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    received, joins = call.perform(needs_gradient(xs), lambda: call.comm.alltoall(xs))
    return _AllToAll.apply(ANCHOR, received, call, *xs) if joins else received  # type: ignore[return-value]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: tuple[Tensor, ...], call: Call, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return received

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None,) * 3 + _alltoall(ctx.call.backward(), gradients)
