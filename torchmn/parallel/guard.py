"""Keeps an optimizer from stepping with this rank's share of the gradients as if it were the whole."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchmn.errors import ParallelizeError

_installed = False


def guard(parameter: nn.Parameter) -> None:
    """Let only multi-node optimizers step this parameter, whose gradient is a share of the whole."""
    global _installed
    parameter._torchmn_is_shared = True  # type: ignore[attr-defined]
    if not _installed:
        register_optimizer_step_pre_hook(_check)
        _installed = True


def _check(optimizer: Optimizer, *_: Any) -> None:
    # A multi-node optimizer marks the one that it wraps.
    if getattr(optimizer, "_torchmn_takes_mean", False) or hasattr(optimizer, "actual_optimizer"):
        return
    if any(getattr(p, "_torchmn_is_shared", False) for group in optimizer.param_groups for p in group["params"]):
        raise ParallelizeError(
            f"{type(optimizer).__name__}.step on a parallel model: each rank has only its share of the gradients. Wrap "
            "it: optimizer = torchmn.create_multi_node_optimizer(optimizer, grid, model=model)"
        )
