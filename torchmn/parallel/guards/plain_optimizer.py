"""Guard: optimizers of torch that would step with the gradients of one rank."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchmn.gradient_role import role_of
from torchmn.optim.wrapper import step_lock_of
from torchmn.parallel.events import StepEvent, announce, guard


@guard(
    on="step",
    why="each rank has the gradient of its samples or tiles: replicas would silently diverge",
    replaces="adds a hook before the step of every optimizer of torch",
)
def plain_optimizer(seen: StepEvent) -> str | None:
    """Returns an error if an optimizer that is not a multi-node one steps the parameters of a parallel model."""
    optimizer = seen.optimizer
    if step_lock_of(optimizer) is not None:  # a multi-node optimizer has wrapped it
        return None
    if not any(role_of(p).needs_mean for group in optimizer.param_groups for p in group["params"]):
        return None
    return (
        f"{type(optimizer).__name__}.step on a parallel model: each rank has only its share of the gradients. Wrap "
        "the optimizer: optimizer = torchmn.create_multi_node_optimizer(optimizer, grid, model=model)"
    )


class _AnnounceStep:
    """A hook before the step of every optimizer of torch."""

    reads_gradients_only = True  # optim/fused.py may still fuse updates

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        announce("step", StepEvent(optimizer))


register_optimizer_step_pre_hook(_AnnounceStep())
