"""Events of a parallel model, at which guards look.

The guards are in parallel/guards. A guard is a function that gets a `Model`, `Forward`, `Output` or `Step` and raises,
or returns the text of an error, or None. For `trace` it is a subclass of `TraceGuard`.

model    a model was made parallel, on all ranks; it was not called yet
trace    a model is run on meta tensors, before the first forward with a new shape; guards must not communicate
forward  a forward begins, on the ranks of `grid.tiles`; in training also on those of `grid.replicas`
output   a forward has ended, on the same ranks
step     an optimizer, any one, is about to step
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn
from torch.optim import Optimizer

from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.guard_table import GuardTable

Event = Literal["model", "trace", "forward", "output", "step"]

GUARDS = GuardTable("torchmn.parallel.guards")
guard = GUARDS.guard


def announce(event: Event, seen: Any) -> None:
    """Calls the guards of an event.

    Raises:
        ParallelizeError: with the text that a guard returned.
    """
    for each in GUARDS.by_event[event]:
        problem = each.look(seen)
        if problem is not None:
            raise ParallelizeError(problem)


class Parallelism(Protocol):
    """What guards may know of how a model is parallel.

    Attributes:
        looks: how often a guard has looked at this model, by the guard's name; for those that look a few times only.
    """

    grid: ProcessGrid
    mode: str
    cuts_images: bool
    output: str
    looks: Counter[str]


@dataclass(frozen=True)
class Model:
    """Seen at `model`."""

    model: nn.Module
    parallelism: Parallelism


@dataclass(frozen=True)
class Forward:
    """Seen at `forward`."""

    model: nn.Module
    parallelism: Parallelism
    args: tuple
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Output:
    """Seen at `output`."""

    model: nn.Module
    parallelism: Parallelism
    result: Any


@dataclass(frozen=True)
class Step:
    """Seen at `step`."""

    optimizer: Optimizer


class TraceGuard:
    """Base class of guards that look at `trace`: one is made for each run without values."""

    def __init__(self, model: nn.Module):
        """The run begins."""

    def before(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """A torch function is about to be called."""

    def after(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """A torch function was called."""

    def end(self, result: Any) -> None:
        """The run has ended with that output of the model."""
