"""Joining a delegate to other values, so that backward from them visits the `send` it stands for.

Differentiable: gradients pass through unchanged, and the delegate gets none, but is visited.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.checks import describe
from torchmn.communicators.uncompiled import uncompiled
from torchmn.errors import ArgumentError


@uncompiled
def pseudo_connect(delegate_variable: Tensor | None, *actual_variables: Tensor) -> Any:
    """The actual variables, unchanged, from which backward also visits what `delegate_variable` stands for.

    One in, one out; several in, a tuple out. At least one of them must be able to have a gradient (a floating-point
    tensor), or there would be nothing to carry the delegate; another delegate is one.
    """
    for place, x in enumerate(actual_variables):
        if not isinstance(x, Tensor):
            raise ArgumentError(f"pseudo_connect: expected tensors, got {describe(x)} at place {place}")
    if delegate_variable is not None and not isinstance(delegate_variable, Tensor):
        raise ArgumentError(
            f"pseudo_connect: expected delegate_variable to be a tensor or None, got {describe(delegate_variable)}"
        )
    if not actual_variables:
        raise ArgumentError("pseudo_connect: expected the variables to connect the delegate to, got none")
    if delegate_variable is None or not (torch.is_grad_enabled() and delegate_variable.requires_grad):
        joined = actual_variables
    elif not any(_has_gradient(x) for x in actual_variables):
        raise ArgumentError(
            "pseudo_connect: expected at least one floating-point tensor to carry the delegate, got "
            + ", ".join(describe(x) for x in actual_variables)
        )
    else:
        joined = _PseudoConnect.apply(delegate_variable, *actual_variables)
    return joined[0] if len(actual_variables) == 1 else joined


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class _PseudoConnect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delegate: Tensor, *actual: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Not the inputs themselves, nor views: autograd forbids in-place operations on those.
        out = tuple([x.detach() for x in actual])
        without = [x for x in out if not _has_gradient(x)]
        if without:
            ctx.mark_non_differentiable(*without)
        return out

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)  # autograd visits the delegate all the same
