"""Differentiable gather: the tensors of all ranks, on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import Function
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.collective import Call, needs_gradient
from torchmn.functions.nodes import ANCHOR


@uncompiled
def gather(comm: Communicator, x: Tensor, root: int = 0) -> Any:
    """Returns the tensors of all ranks on rank `root`, a delegate on the others.

    Differentiable with respect to every rank's `x`. The adjoint is `scatter`. On `root`, backward must reach at least
    one element of the result; the others get zeros. On the other ranks the delegate must be part of the backward, as
    that of `send`: its backward waits for the gradient.

    Args:
        comm: communicator whose ranks take part; all of them must call.
        x: this rank's tensor. Shapes may differ between ranks, dtypes may not.
        root: rank that gets the tensors.

    Returns:
        On `root`, a tuple of tensors in rank order; on the other ranks a 0-d tensor.

    Raises:
        MismatchError: on every rank, if dtypes or `root` differ or a rank calls another operation.
    """
    return run_gather(Call.new(comm), x, root)


def run_gather(call: Call, x: Tensor, root: int) -> Any:
    parts, in_graph = call.perform(needs_gradient(x), lambda: call.comm.gather(x, root))
    if parts is None:
        parts = torch.zeros((), device="cpu")
    return _Gather.apply(ANCHOR, x, (parts,), call, root) if in_graph else parts


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, parts: tuple[Any], call: Call, root: int) -> Any:
        ctx.call, ctx.root = call, root
        return parts[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from torchmn.functions.scatter import run_scatter  # which imports this file for its adjoint

        # On ranks other than the root, `gradients` is the delegate's: its value is ignored, its graph is not.
        return None, run_scatter(ctx.call.backward(), gradients, ctx.root), None, None, None
