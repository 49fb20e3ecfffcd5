"""Tables of guards.

A guard refuses what a user may do that would silently give other numbers than one rank has, or leave ranks waiting. The
core announces events and uses whatever guards are in the table; their package is loaded by name, and the core gives the
same results without it. Users cannot switch guards off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torchmn.optional import optional_module

Look = TypeVar("Look", bound=Callable[..., Any])


class Guard(NamedTuple):
    """An entry of a table.

    Attributes:
        name: of the function or class.
        look: the function or class; the file that announces the event describes its arguments.
        why: what would be wrong without the guard.
        replaces: which function of sys, os or torch the guard replaces or hooks into, and why; "" for none.
    """

    name: str
    event: str
    look: Callable[..., Any]
    why: str
    replaces: str


class GuardTable:
    """The guards of one package, by event."""

    def __init__(self, package: str):
        self.by_event: defaultdict[str, list[Guard]] = defaultdict(list)
        self._package = package
        self._loaded = False

    def load(self) -> None:
        """Loads the package with the guards, if it exists."""
        if not self._loaded:
            optional_module(self._package)  # ranks that are threads wait for each other in the import
            self._loaded = True

    def guard(self, on: str, *, why: str, replaces: str = "") -> Callable[[Look], Look]:
        """Registers a function or class as a guard for an event. See `Guard`."""

        def register(look: Look) -> Look:
            self.by_event[on].append(Guard(look.__name__, on, look, why, replaces))
            return look

        return register

    def entries(self) -> dict[str, Guard]:
        """Returns all guards by name."""
        return {guard.name: guard for guards in self.by_event.values() for guard in guards}

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """A block in which one guard is taken away, for tests."""
        taken = self.entries()[name]
        self.by_event[taken.event].remove(taken)
        try:
            yield
        finally:
            self.by_event[taken.event].append(taken)
