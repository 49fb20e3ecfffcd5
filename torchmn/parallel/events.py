"""Events of a parallel model, and the table of the guards that are called for them.

The guards are in parallel/guards. A guard is a function that is called with a `ModelEvent`, `SamplesEvent`,
`ForwardEvent`, `OutputEvent` or `StepEvent`, and raises an error, returns the text of one, or returns None. A guard of
`trace` is a subclass of `TraceGuard`.

model    a model was made parallel, on all ranks; it was not called yet
trace    a model runs on meta tensors, before the first forward with inputs of a new kind; guards must not
         communicate
samples  ranks along `data` have different samples, and a model was traced, or under datapar is about to run for the
         first time; guards must not communicate
forward  a forward begins, on the ranks of `grid.tiles`; in training also on those of `grid.replicas`
output   a forward has ended, on the same ranks
step     any optimizer of torch is about to step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn
from torch.optim import Optimizer

from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.guard_table import GuardTable

Event = Literal["model", "trace", "samples", "forward", "output", "step"]

GUARDS = GuardTable("torchmn.parallel.guards")
guard = GUARDS.guard


def announce(event: Event, seen: Any) -> None:
    """Calls the guards of an event.

    Args:
        event: its name.
        seen: the argument of the guards, such as a `ForwardEvent`.

    Raises:
        ParallelizeError: with the text that a guard returned.
    """
    for each in GUARDS.by_event[event]:
        problem = each.implementation(seen)
        if problem is not None:
            raise ParallelizeError(problem)


class ParallelismInfo(Protocol):
    """The members of a `Parallelism` that guards read.

    Attributes:
        guard_counts: number of calls of each guard that checks a model a few times only, by the guard's name.
    """

    grid: ProcessGrid
    mode: str
    cuts_images: bool
    output: str
    guard_counts: Counter[str]


@dataclass(frozen=True)
class ModelEvent:
    """Argument of the guards of `model`."""

    model: nn.Module
    parallelism: ParallelismInfo


@dataclass(frozen=True)
class SamplesEvent:
    """Argument of the guards of `samples`.

    Attributes:
        run: runs the model on meta tensors with a batch of the given size, and calls a guard for each torch function.
            Raises any error of the model, for which this size may be wrong.
    """

    model: nn.Module
    parallelism: ParallelismInfo
    run: Callable[[int, TraceGuard], None]


@dataclass(frozen=True)
class ForwardEvent:
    """Argument of the guards of `forward`."""

    model: nn.Module
    parallelism: ParallelismInfo
    args: tuple
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class OutputEvent:
    """Argument of the guards of `output`."""

    model: nn.Module
    parallelism: ParallelismInfo
    result: Any


@dataclass(frozen=True)
class StepEvent:
    """Argument of the guards of `step`."""

    optimizer: Optimizer


class TraceGuard:
    """Base class of the guards of `trace`. One object is made for each dry run."""

    def __init__(self, model: nn.Module):
        """Called before the run."""

    def before(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before each torch function."""

    def after(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Called after each torch function."""

    def end(self, result: Any) -> None:
        """Called after the run with the output of the model."""
