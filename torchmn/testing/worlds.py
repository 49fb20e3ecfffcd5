"""`@ranks`: the numbers of ranks, and the transports, on which a test runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

MARK = "torchmn_ranks"
TRANSPORTS = ("threads", "mpi", "gloo")
TIMEOUT = 60.0

Test = TypeVar("Test", bound=Callable[..., Any])


@dataclass(frozen=True)
class TestedRanks:
    """Ranks on which a test runs: a transport, their number, and the seconds that a wait may last."""

    transport: str
    size: int
    timeout: float

    def __str__(self) -> str:
        return f"{self.transport}-{self.size}"


def ranks(*sizes: int, on: str | Iterable[str] = "threads", timeout: float = TIMEOUT) -> Callable[[Test], Test]:
    """Returns a decorator that runs a test, a function with an argument `comm`, on every rank of each number of ranks.

    A rank that fails fails the test, and ends the others. Several decorators of one test add up.

    Example::

        @ranks(1, 2, 4)
        @ranks(2, on="mpi", timeout=20)
        def test_every_rank_gets_the_sum(comm): ...

    Args:
        sizes: numbers of ranks; each is one test.
        on: "threads", ranks in the process of pytest, which share fixtures; "mpi" or "gloo", processes that
            `torchmn run` starts for this test and that have their own fixtures; or several of these.
        timeout: seconds that a rank may wait for others, before the test fails with a table of what each rank does.

    Returns:
        The decorator, which returns the test with a mark.

    Raises:
        ValueError: for a size below 1, or an unknown transport.
    """
    transports = (on,) if isinstance(on, str) else tuple(on)
    wrong = [each for each in transports if each not in TRANSPORTS]
    if wrong or not transports or not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(
            f"@ranks: expected numbers of ranks of at least 1, and on= one or several of {', '.join(TRANSPORTS)}; "
            f"got {sizes} and on={on!r}"
        )

    def decorate(test: Test) -> Test:
        return pytest.mark.torchmn_ranks([TestedRanks(each, size, timeout) for each in transports for size in sizes])(
            test
        )

    return decorate


def worlds_of(marks: Iterable[pytest.Mark]) -> Iterator[TestedRanks]:
    """Yields the worlds of a test's decorators, the first one first, each once."""
    seen: set[str] = set()
    for mark in reversed(list(marks)):
        for world in mark.args[0]:
            if str(world) not in seen:
                seen.add(str(world))
                yield world
