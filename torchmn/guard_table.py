"""GuardTable: a registry of guards by event.

A guard is a check that raises an error where a program would silently compute other numbers than one rank, or where
ranks would wait forever. The core announces events and calls the guards of the table; their package is loaded by name,
and the core gives the same results without it. Users cannot switch guards off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torchmn.optional import optional_module

Implementation = TypeVar("Implementation", bound=Callable[..., Any])


class Guard(NamedTuple):
    """An entry of a table.

    Attributes:
        name: of the function or class.
        event: on which it is called.
        implementation: the function or class; the file that announces the event describes its arguments.
        why: what would be wrong without the guard.
        replaces: which function of sys, os or torch the guard replaces or hooks into, and why; "" for none.
    """

    name: str
    event: str
    implementation: Callable[..., Any]
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
            optional_module(self._package)  # the import lock makes ranks that are threads wait for it
            self._loaded = True

    def guard(self, on: str, *, why: str, replaces: str = "") -> Callable[[Implementation], Implementation]:
        """Registers a function or class as a guard for an event. See `Guard`."""

        def register(implementation: Implementation) -> Implementation:
            self.by_event[on].append(Guard(implementation.__name__, on, implementation, why, replaces))
            return implementation

        return register

    def entries(self) -> dict[str, Guard]:
        """Returns all guards by name."""
        return {guard.name: guard for guards in self.by_event.values() for guard in guards}

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Context without one of the guards, for tests."""
        removed = self.entries()[name]
        self.by_event[removed.event].remove(removed)
        try:
            yield
        finally:
            self.by_event[removed.event].append(removed)
