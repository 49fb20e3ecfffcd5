"""What guards see of a multi-node optimizer.

The guards are in optim/guards: they refuse steps after which ranks would have different parameters. Each optimizer has
one object of every class, and what it returns travels with the message in which ranks agree on a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.communicators.communicator import Communicator
from torchmn.guard_table import GuardTable
from torchmn.optim.gradients import Collection, Gradient
from torchmn.optim.synchronized import SynchronizedGradients


@dataclass(frozen=True)
class Optimizing:
    """One multi-node optimizer, as guards see it.

    Attributes:
        actual: the optimizer that it wraps.
        synchronized: the gradients that are means already.
        refuse_clipping: raises if gradients of these parameters must not be clipped now.
    """

    comm: Communicator
    actual: Optimizer
    model: nn.Module | None
    collection: Collection
    synchronized: SynchronizedGradients
    refuse_clipping: Callable[[str, Sequence[Tensor]], None]


class StepGuard:
    """Base class of guards of an optimizer's steps."""

    def __init__(self, seen: Optimizing):
        self.seen = seen

    def same(self, grads: list[Gradient]) -> dict[str, Any]:
        """Returns what must be the same on all ranks in the next step, by its name in messages."""
        return {}

    def differ(self, grads: list[Gradient]) -> Any:
        """Returns what the other ranks get to know."""
        return None

    def check(self, statements: Sequence[Any], grads: list[Gradient]) -> None:
        """Raises, on all ranks, because of what `differ` returned there; called only if these values are not equal."""

    def stepped(self) -> None:
        """The optimizer has stepped."""

    def loaded(self) -> None:
        """A state was loaded."""

    def cleared(self) -> None:
        """Gradients were set to zero."""


GUARDS = GuardTable("torchmn.optim.guards")
guard = GUARDS.guard


def overriding(guards: Sequence[StepGuard], method: str) -> list[StepGuard]:
    """Returns those of the guards that have a method which does nothing in `StepGuard`."""
    return [guard for guard in guards if getattr(type(guard), method) is not getattr(StepGuard, method)]


def guards_of(seen: Optimizing) -> list[StepGuard]:
    """Returns new guards for an optimizer."""
    GUARDS.load()
    return [guard.look(seen) for guard in GUARDS.by_event["step"]]
