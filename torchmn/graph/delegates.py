"""Delegates of a chain: by them the backward of a rank visits all its messages, in the reverse order of forward.

A rank's messages form one chain of delegates. What was sent before a value was received is connected behind that value,
so backward sends the value's gradient before it waits for the gradient of anything that was sent earlier. Backward is
forward's schedule in reverse, which cannot deadlock if forward did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import Function
from torchmn.functions.pseudo_connect import connect


class _Join(Function):
    """A 0-d zero that depends on tensors; backward visits them with a gradient of None."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(tensors)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, ...]:
        # Autograd visits the nodes for None, too, and adds no zeros.
        return (None,) * ctx.count


def join(delegate: Tensor | None, tensors: Iterable[Tensor]) -> Tensor | None:
    """Returns a delegate of `delegate` and of those `tensors` that need a gradient; None if there are none."""
    needing = [x for x in tensors if x.requires_grad]
    if not needing:
        return delegate
    if delegate is not None:
        needing.append(delegate)
    return _Join.apply(*needing)


def attach(delegate: Tensor | None, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns `tensors`; backward from any floating-point one of them visits `delegate`, too."""
    if delegate is None or not any(x.is_floating_point() or x.is_complex() for x in tensors):
        return tensors
    # One node for all: a loss that depends on only one of several outputs visits everything.
    return connect(delegate, tensors)


def blank() -> Tensor:
    """Returns the delegate of a rank without messages; its backward does nothing."""
    return torch.zeros((), requires_grad=torch.is_grad_enabled(), device="cpu")
