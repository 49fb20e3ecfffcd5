"""Events of a parallel model, at which guards look.

The core announces them and knows no guard: those of parallel/guards are loaded by name, and the core computes the same
without them. A guard looks for something that a user may do and that would silently give other numbers than one rank
has, or leave ranks waiting; it raises, or returns the text of an error.

model    a model was made parallel, and was not called yet
trace    a model is run without values, before the first forward with inputs of a new shape
forward  a forward begins
output   a forward has ended
step     an optimizer, any one, is about to step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer

from torchmn.communicators.optional import optional_module
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError

Event = Literal["model", "trace", "forward", "output", "step"]
Look = TypeVar("Look", bound=Callable[..., Any])


class Guard(NamedTuple):
    """An entry of the table.

    Attributes:
        name: of the function or class that looks.
        look: gets what is seen at the event (`Model`, `Forward`, `Output`, `Step`). For `trace`, a `TraceGuard`.
        why: what would be wrong without it.
        replaces: which function of sys, os or torch it replaces or hooks into, and why; "" for none.
    """

    name: str
    event: Event
    look: Callable[..., Any]
    why: str
    replaces: str


GUARDS: dict[str, Guard] = {}


def guard(on: Event, *, why: str, replaces: str = "") -> Callable[[Look], Look]:
    """Registers a guard. See `Guard`."""

    def register(look: Look) -> Look:
        GUARDS[look.__name__] = Guard(look.__name__, on, look, why, replaces)
        return look

    return register


@cache
def load_guards() -> None:
    """Loads the guards, if they are there."""
    optional_module("torchmn.parallel.guards")


def guards_on(event: Event) -> list[Guard]:
    """Returns the guards that look at an event."""
    return [guard for guard in GUARDS.values() if guard.event == event]


def announce(event: Event, seen: Any) -> None:
    """Lets the guards of an event look.

    Raises:
        ParallelizeError: with the text that a guard returned.
    """
    for each in tuple(GUARDS.values()):
        if each.event == event:
            problem = each.look(seen)
            if problem is not None:
                raise ParallelizeError(problem)


@contextmanager
def without(name: str) -> Iterator[None]:
    """A block in which a guard does not look, for tests."""
    taken = GUARDS.pop(name)
    try:
        yield
    finally:
        GUARDS[name] = taken


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
