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
    groups = []
    for group in optimizer.param_groups:
        named = []
        for name in optimizer.defaults:
            if name not in ONLY_SPEED:
                value = group.get(name)
                plain = value if isinstance(value, _PLAIN) else plain_value(value)
                if plain is not None:
                    named.append((name, plain))
        groups.append(tuple(named))
    return tuple(groups)


def plain_value(value: Any) -> Any:
    """A value that can be compared by what it says; None for others. A number on a GPU is not waited for."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.dim() == 0 else None
    return value if isinstance(value, _PLAIN) else None
