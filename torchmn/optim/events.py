"""The interface between a multi-node optimizer and its guards.

The guards, in optim/guards, raise errors before steps after which ranks would have different parameters. Each optimizer
has one object of every guard class; what it returns is sent with the message by which ranks agree on a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.communicators.communicator import Communicator
from torchmn.guard_table import GuardTable
from torchmn.optim.gradients import Gradient, GradientCollection
from torchmn.optim.synchronized import SynchronizedGradients


@dataclass(frozen=True)
class WatchedOptimizer:
    """What guards may use of a multi-node optimizer.

    Attributes:
        comm: communicator of its ranks.
        actual: the wrapped optimizer.
        model: the model that it was created with, or None.
        collection: its gradients.
        synchronized: the gradients that are means already.
        check_clipping: raises if gradients of these parameters must not be clipped now.
    """

    comm: Communicator
    actual: Optimizer
    model: nn.Module | None
    collection: GradientCollection
    synchronized: SynchronizedGradients
    check_clipping: Callable[[str, Sequence[Tensor]], None]


class StepGuard:
    """Base class of guards of an optimizer's steps."""

    def __init__(self, watched: WatchedOptimizer):
        self.watched = watched

    def same(self, grads: list[Gradient]) -> dict[str, Any]:
        """Returns what must be the same on all ranks in the next step, by its name in error messages."""
        return {}

    def differ(self, grads: list[Gradient]) -> Any:
        """Returns a value that is sent to the other ranks, for `check`."""
        return None

    def check(self, statements: Sequence[Any], grads: list[Gradient]) -> None:
        """Raises, on all ranks, depending on what `differ` returned there; called only if ranks differ in it."""

    def stepped(self) -> None:
        """Called after a step."""

    def loaded(self) -> None:
        """Called after a state was loaded."""

    def initialized(self) -> None:
        """Called on all ranks when lazy parameters have got their shapes and rank 0's values."""

    def cleared(self) -> None:
        """Called after gradients were set to zero."""


GUARDS = GuardTable("torchmn.optim.guards")
guard = GUARDS.guard


def overriding(guards: Sequence[StepGuard], method: str) -> list[StepGuard]:
    """Returns the guards whose class overrides a method of `StepGuard`."""
    return [guard for guard in guards if getattr(type(guard), method) is not getattr(StepGuard, method)]


def guards_of(watched: WatchedOptimizer) -> list[StepGuard]:
    """Returns new guards for an optimizer."""
    GUARDS.load()
    return [guard.implementation(watched) for guard in GUARDS.by_event["step"]]
