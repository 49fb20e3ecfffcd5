"""Everybody's tensor for one rank, as a step of the computation.

Differentiable with respect to every rank's `x`. The adjoint is `scatter`, which is this one's adjoint in turn.
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
def gather(comm: Communicator, x: Tensor, root: int = 0) -> Any:
    """On `root`, a tuple of every rank's tensor in rank order (shapes may differ, dtypes not); else a delegate.

    The delegate must take part in its rank's backward, as that of `send` must: its backward waits for the gradient.
    On `root` backward must reach at least one element; the others get zeros.
    """
    return gather_in(Call.new(comm), x, root)


def gather_in(call: Call, x: Tensor, root: int) -> Any:
    parts, joins = call.perform(needs_gradient(x), lambda: call.comm.gather(x, root))
    if parts is None:
        parts = torch.zeros((), device="cpu")
    return _Gather.apply(ANCHOR, x, (parts,), call, root) if joins else parts


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, parts: tuple[Any], call: Call, root: int) -> Any:
        ctx.call, ctx.root = call, root
        return parts[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from torchmn.functions.scatter import scatter_in  # which needs this file for its own adjoint

        # On the other ranks that is the delegate's gradient: its value is ignored, its graph is not.
        return None, scatter_in(ctx.call.backward(), gradients, ctx.root), None, None, None
