"""Records what each rank waits for, since when, and in which thread.

Each rank has one `Watch`. An operation that may block registers a `Wait` there on entry and removes it on exit, which
is cheap. The rest (missing ranks, the line of the user's code) is computed only for a report, in another thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet, WeakValueDictionary

from torchmn._torch_compat import ProfilerRange, is_profiling
from torchmn.communicators.watchdog.source_lines import line_of_thread
from torchmn.context import here, process
from torchmn.errors import TorchMNError

FINALIZE = "finalize"


class WatchedGroup(Protocol):
    """The members of a `Group` that the watchdog reads."""

    name: str
    world_ranks: tuple[int, ...]
    collectives: int
    owner: Any
    watch: Watch
    settings: Any

    def claim(self, operation: str) -> None: ...


class Wait:
    """A context manager that registers an operation which may block. Cheap: every operation enters one.

    Without a peer the operation is collective, and raises if the group's collectives belong to another thread.

    Args:
        about: more data on this wait, for a section of the report.
    """

    __slots__ = ("about", "group", "operation", "peer", "previous", "range", "since", "tag", "thread")

    def __init__(
        self, group: WatchedGroup, operation: str, peer: int | None = None, tag: int | None = None, about: Any = None
    ):
        self.group = group
        self.operation = operation
        self.peer = peer
        self.tag = tag
        self.about = about

    def __enter__(self) -> Wait:
        group = self.group
        if here.isolated:
            raise TorchMNError(f"{self.operation}: expected no communication in a dry run that only this rank makes")
        if self.peer is None and group.owner is not here.mark:
            group.claim(self.operation)
        self.since = monotonic()
        self.thread = threading.get_ident()
        waits = group.watch.waits
        self.previous = waits.get(self.thread)
        waits[self.thread] = self
        self.range = None
        if is_profiling():
            self.range = ProfilerRange(f"torchmn::{self.operation}")
            self.range.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.range is not None:
            self.range.__exit__(None, None, None)
        watch = self.group.watch
        if self.previous is None:
            del watch.waits[self.thread]
            watch.waited += monotonic() - self.since
        else:
            watch.waits[self.thread] = self.previous


@dataclass(frozen=True)
class RankState:
    """What one rank is doing, in world ranks: a row of the watchdog's table."""

    rank: int
    host: str
    operation: str  # "" in user code
    communicator: str = ""
    sequence: int = 0  # number of collective operations of that communicator that this rank has entered
    peer: int | None = None
    tag: int | None = None
    members: tuple[int, ...] = ()
    seconds: float = 0.0
    since: float = 0.0  # when the wait began, by this rank's clock: identifies the wait
    where: str = ""
    left: bool = False  # also if lost
    lost: bool = False
    reports: dict[str, Any] = field(default_factory=dict)  # the facts of each of `sections`, by name

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RankState:
        return RankState(**{**values, "members": tuple(values["members"])})


class ReportSection(NamedTuple):
    """Lines of another layer below the watchdog's table.

    Attributes:
        facts: returns those of one rank, as a value that JSON can represent.
        lines: returns the lines, given the facts of each rank.
    """

    facts: Callable[[Watch], Any]
    lines: Callable[[dict[int, Any]], list[str]]


sections: dict[str, ReportSection] = {}
"""Sections by name. A layer registers its section when it is imported."""


class Broken(NamedTuple):
    """Why a communicator cannot be used for collective operations any more."""

    rank: int  # the world rank whose two threads used it
    reason: str
    since: float


class Watch:
    """The waits of one rank, by thread.

    Attributes:
        waits: by thread ident.
        waited: seconds in waits that have ended.
        communicators: those of this rank.
        pinned: communicators that have sent something: kept alive until it is delivered, even if the user drops them.
            Those with nothing left to deliver are removed by the next `split`.
        main_thread: ident of the thread that runs the user's script on this rank.
        claiming: lock for the attributes below, and for the owners of groups.
        claimed: groups that have or had an owner, by name.
        broken: by name of the group.
        announce: reports a broken communicator, and the reason, to all ranks.
    """

    def __init__(self, rank: int, host: str):
        self.rank = rank
        self.host = host
        self.waits: dict[int, Wait] = {}
        self.waited = 0.0
        self.communicators: WeakSet[Any] = WeakSet()
        self.pinned: set[Any] = set()
        self.main_thread = threading.main_thread().ident or 0
        self.claiming = threading.Lock()
        self.claimed: WeakValueDictionary[str, WatchedGroup] = WeakValueDictionary()
        self.broken: dict[str, Broken] = {}
        self.announce: Callable[[str, str], object] | None = None
        process.watches.add(self)

    def longest(self) -> Wait | None:
        """Returns the wait that began first, or None if this rank does not wait."""
        return min(tuple(self.waits.values()), key=lambda wait: wait.since, default=None)

    def state(self) -> RankState:
        """Returns what this rank is doing now."""
        wait = self.longest()
        facts = {name: section.facts(self) for name, section in sections.items()}
        if wait is None:
            return RankState(self.rank, self.host, "", where=line_of_thread(self.main_thread), reports=facts)
        group = wait.group
        return RankState(
            rank=self.rank,
            host=self.host,
            operation=wait.operation,
            communicator=group.name,
            sequence=group.collectives,
            peer=None if wait.peer is None else group.world_ranks[wait.peer],
            tag=wait.tag,
            members=group.world_ranks,
            seconds=monotonic() - wait.since,
            since=wait.since,
            where=line_of_thread(wait.thread),
            reports=facts,
        )

    def mark_broken(self, name: str, rank: int, reason: str) -> None:
        """Makes every thread of this rank raise when it begins a collective operation of that communicator."""
        with self.claiming:
            self.broken.setdefault(name, Broken(rank, reason, monotonic()))
            group = self.claimed.get(name)
            if group is not None:
                group.owner = None  # so that the owner, too, calls `claim` again

    def broken_in(self, wait: Wait) -> Broken | None:
        """Returns why the collective operation of this wait cannot end; None if no reason is known."""
        return self.broken.get(wait.group.name) if wait.peer is None and wait.operation != FINALIZE else None


def close_inherited_communicators() -> None:
    """Closes the communicators of the rank that this process was forked from, without sending anything.

    A forked process, such as a worker of a DataLoader, has copies of the connections to other ranks, which would take
    its messages for those of the rank itself: the rank would wait for replies that never come, or get another's. No
    watchdog runs in it.
    """
    for watch in list(process.watches):
        for comm in list(watch.communicators):
            if comm.size > 1 and not comm.group.closed:
                comm.group.closed = True
                comm.group.closed_because = (
                    "in a process that was forked from this rank, and is no rank (a worker of a DataLoader?): "
                    "communicate in the rank itself, and give its workers what they need before they start"
                )


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=close_inherited_communicators)
