"""The settings of an optimizer that ranks must have alike: learning rate, momentum and so on."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# How a step is computed, and not what comes out: ranks may differ in it.
ONLY_SPEED = ("foreach", "fused", "capturable", "differentiable")
_PLAIN = (bool, int, float, str, tuple)


def hyperparameters(optimizer: Optimizer) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Of each group, what the optimizer was made with or a schedule has set since: learning rate, momentum, betas."""
    names = [name for name in optimizer.defaults if name not in ONLY_SPEED]
    return tuple(
        tuple((name, plain) for name in names if (plain := plain_value(group.get(name))) is not None)
        for group in optimizer.param_groups
    )


def plain_value(value: Any) -> Any:
    """A value that can be compared by what it says; None for others. A number on a GPU is not waited for."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.dim() == 0 else None
    return value if isinstance(value, _PLAIN) else None
