"""`@ranks`: in which worlds the body of a test runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

TestBody = TypeVar("TestBody", bound=Callable[..., Any])

# The order in which a session visits the transports: the cheap ones first, so that a slip shows early.
TRANSPORTS = ("solo", "threads", "mpi", "openmpi", "gloo")
IN_THIS_PROCESS = ("solo", "threads")
DEFAULT_TRANSPORTS = ("threads", "mpi", "gloo")
DEFAULT_TIMEOUT = 60.0


@dataclass(frozen=True)
class World:
    """A transport and a number of ranks: what one worker pool serves."""

    transport: str
    size: int

    def __str__(self) -> str:
        return f"{self.transport}-{self.size}"


def ranks(*sizes: int, on: str | Iterable[str] | None = None, timeout: float = DEFAULT_TIMEOUT):
    """A decorator that runs `def test_x(comm, ...)` on every rank of a world of each size in `sizes`.

    `on` names one transport or several of solo, threads, mpi, openmpi, gloo; without it: threads, mpi, gloo,
    and solo where the size is 1. `timeout` is how many seconds one world may take before the test fails.
    Stacked decorators add up.
    """
    transports = (on,) if isinstance(on, str) else tuple(on) if on is not None else None
    unknown = set(transports or ()) - set(TRANSPORTS)
    if unknown or not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"@ranks: expected sizes >= 1, on={TRANSPORTS}, got sizes {sizes}, on={on!r}")
    return pytest.mark.ranks(*sizes, on=transports, timeout=timeout)


def every_world(body: TestBody) -> TestBody:
    """Runs a test at 1, 2, 3 and 4 ranks on every transport, and at 6, 9 and 16 as threads."""
    return ranks(1, 2, 3, 4)(ranks(6, 9, 16, on="threads")(body))


def every_small_world(body: TestBody) -> TestBody:
    """Runs a test at 1 to 4 ranks on every transport, and at 6 as threads: for long ones, of what travels."""
    return ranks(1, 2, 3, 4)(ranks(6, on="threads")(body))


def every_world_of_several(body: TestBody) -> TestBody:
    """Runs a test as `every_world` does, but never alone: for messages between two ranks."""
    return ranks(2, 3, 4)(ranks(6, 9, 16, on="threads")(body))


def worlds_of(marks: Iterable[pytest.Mark]) -> Iterator[World]:
    """The worlds that the `ranks` marks of one test ask for, each once."""
    seen = set()
    for mark in marks:
        for size in mark.args:
            transports = mark.kwargs["on"]
            if transports is None:
                transports = DEFAULT_TRANSPORTS + (("solo",) if size == 1 else ())
            for transport in transports:
                world = World(transport, size)
                if world not in seen:
                    seen.add(world)
                    yield world
