"""Delegates: how the backward pass of one rank finds every message of the forward pass, and in which order.

A rank's messages form one chain of delegates. What was sent before a value was received hangs behind that value, so
backward answers for the value before it waits for anything that was sent earlier: it goes through the forward plan in
reverse, which can not hang if forward did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.functions.pseudo_connect import connect


class _Join(torch.autograd.Function):
    """A 0-d zero that depends on tensors and gives them no gradient: backward reaches them, and adds nothing."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(tensors)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, ...]:
        # None and not zeros: autograd still visits every node, and no zeros are made and added on the way.
        return (None,) * ctx.count


def join(delegate: Tensor | None, tensors: Iterable[Tensor]) -> Tensor | None:
    """A delegate that stands for `delegate` and for those of `tensors` that autograd knows of; None if for nothing."""
    known = [x for x in tensors if x.requires_grad]
    if not known:
        return delegate
    if delegate is not None:
        known.append(delegate)
    return _Join.apply(*known)  # type: ignore[return-value]


def attach(delegate: Tensor | None, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors`, so that the backward pass from any float of them reaches `delegate` too."""
    if delegate is None or not any(x.is_floating_point() or x.is_complex() for x in tensors):
        return tensors
    # One node for all of them: a loss that uses only one of several outputs reaches everything.
    return connect(delegate, tensors)


def blank() -> Tensor:
    """The delegate of a rank on which nothing waits for a gradient; backward through it does nothing."""
    return torch.zeros((), requires_grad=torch.is_grad_enabled(), device="cpu")
