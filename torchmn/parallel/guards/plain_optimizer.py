"""Optimizers that would step with one rank's share of the gradients."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchmn.gradient_role import role_of
from torchmn.optim.wrapper import lock_of
from torchmn.parallel.events import Step, announce, guard


@guard(
    on="step",
    why="each rank has the gradient of its own samples or tiles: replicas would drift apart silently",
    replaces="a hook of torch before the step of any optimizer: a plain one knows nothing of us",
)
def plain_optimizer(seen: Step) -> str | None:
    """Lets only multi-node optimizers step the parameters of a parallel model."""
    optimizer = seen.optimizer
    if lock_of(optimizer) is not None:  # a multi-node optimizer has wrapped it
        return None
    if not any(role_of(p).needs_mean for group in optimizer.param_groups for p in group["params"]):
        return None
    return (
        f"{type(optimizer).__name__}.step on a parallel model: each rank has only its share of the gradients. Wrap "
        "it: optimizer = torchmn.create_multi_node_optimizer(optimizer, grid, model=model)"
    )


def _announce_step(optimizer: Optimizer, *_: Any) -> None:
    announce("step", Step(optimizer))


_announce_step.only_looks = True  # type: ignore[attr-defined]  (at gradients: fused updates need not mind it)
register_optimizer_step_pre_hook(_announce_step)
