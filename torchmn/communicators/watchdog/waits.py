"""Who waits for whom, since when, from which line.

Each rank has one `Watch`. An operation that may block notes itself there on entry and removes the note on exit;
that is all it costs. Everything else (who is behind, where the user's code stands) is worked out only when
somebody asks, from another thread, by looking at the waiting thread's stack.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from time import monotonic
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet, WeakValueDictionary

from torchmn.context import here, process

FINALIZE = "finalize"
_OWN_PACKAGES = ("torchmn.", "torch.", "mpi4py.", "threading", "importlib.", "runpy", "concurrent.")


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
    """A note that a thread is inside an operation that may block. A context manager, cheap on purpose.

    Without a peer the operation is collective, and raises if the group's belong to another thread.

    Args:
        about: what else a report may say of this wait.
    """

    __slots__ = ("about", "group", "operation", "peer", "previous", "since", "tag", "thread")

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
        if self.peer is None and group.owner is not here.mark:
            group.claim(self.operation)
        self.since = monotonic()
        self.thread = threading.get_ident()
        waits = group.watch.waits
        self.previous = waits.get(self.thread)
        waits[self.thread] = self
        return self

    def __exit__(self, *_: object) -> None:
        watch = self.group.watch
        if self.previous is None:
            del watch.waits[self.thread]
            watch.waited += monotonic() - self.since
        else:
            watch.waits[self.thread] = self.previous


@dataclass(frozen=True)
class RankState:
    """What one rank is doing, in world ranks: a row of the table that ends a stuck job."""

    rank: int
    host: str
    operation: str  # "" in user code
    communicator: str = ""
    sequence: int = 0  # how many collective operations of that communicator this rank has entered
    peer: int | None = None
    tag: int | None = None
    members: tuple[int, ...] = ()
    seconds: float = 0.0
    where: str = ""
    left: bool = False
    reports: dict[str, Any] = field(default_factory=dict)  # by the name of the report

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RankState:
        return RankState(**{**values, "members": tuple(values["members"])})


class Broken(NamedTuple):
    """Why a communicator can not be used for collective operations any more."""

    rank: int  # of the world, where two threads used it
    reason: str
    since: float


class Watch:
    """The waits of one rank, by thread."""

    def __init__(self, rank: int, host: str, thread: int | None = None):
        self.rank = rank
        self.host = host
        self.waits: dict[int, Wait] = {}
        self.waited = 0.0  # seconds in waits that have ended
        self.communicators: WeakSet[Any] = WeakSet()  # those of this rank
        # Communicators that have sent something, which must be delivered even if the user drops them.
        self.pinned: set[Any] = set()
        self.main_thread = thread or threading.main_thread().ident or 0
        self.claiming = threading.Lock()  # for what follows, and for the owners of groups
        self.claimed: WeakValueDictionary[str, WatchedGroup] = WeakValueDictionary()  # that have or had an owner
        self.broken: dict[str, Broken] = {}  # by the group's name
        self.announce: Callable[[str, str], object] | None = None  # tells all ranks which is broken, and why
        process.watches.add(self)

    def longest(self) -> Wait | None:
        """The wait that began first, or None when this rank waits for nobody."""
        return min(tuple(self.waits.values()), key=lambda wait: wait.since, default=None)

    def state(self) -> RankState:
        """What this rank is doing now."""
        wait = self.longest()
        facts = {name: report.facts(self) for name, report in reports.items()}
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
            where=line_of_thread(wait.thread),
            reports=facts,
        )

    def mark_broken(self, name: str, rank: int, reason: str) -> None:
        """Let every thread of this rank raise that begins a collective operation of the communicator of that name."""
        with self.claiming:
            self.broken.setdefault(name, Broken(rank, reason, monotonic()))
            group = self.claimed.get(name)
            if group is not None:
                group.owner = None  # its owner, too, has to ask again

    def broken_in(self, wait: Wait) -> Broken | None:
        """What keeps the collective operation of this wait from its end; None if nothing is known."""
        return self.broken.get(wait.group.name) if wait.peer is None and wait.operation != FINALIZE else None


class Report(NamedTuple):
    """Lines of another layer below the table of a stuck job."""

    facts: Callable[[Watch], Any]  # returns those of one rank, as JSON has it
    lines: Callable[[dict[int, Any]], list[str]]  # returns the lines, from the facts of each rank


reports: dict[str, Report] = {}
"""By name. A layer that has something to say adds itself when it is imported."""


Instruction = tuple[CodeType, int]
"""A code object and an offset in it: cheap to note for every message. `describe_line` finds the line later."""


def line_of_thread(thread: int) -> str:
    """`file:line in function` of the user's code that the thread is in, or "" if it has ended."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else describe_line(*_users_instruction(frame))


def user_line() -> str:
    """`file:line in function` of the user's code that is running."""
    return describe_line(*user_instruction(depth=2))


def user_instruction(depth: int = 1) -> Instruction:
    """The instruction of the user's code that is running.

    depth: how many frames are ours for sure and need no look, from this function's outwards
    """
    frame = sys._getframe(depth)
    if is_library_module(frame.f_globals.get("__name__", "")):
        return _users_instruction(frame)
    return frame.f_code, frame.f_lasti


def running_frames() -> Iterator[FrameType]:
    """The frames of this thread, from the caller's outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _users_instruction(frame: FrameType) -> Instruction:
    """That of the innermost frame from `frame` outwards that is neither ours nor torch's; of `frame` if all are."""
    outer: FrameType | None = frame
    while outer is not None:
        if not is_library_module(outer.f_globals.get("__name__", "")):
            return outer.f_code, outer.f_lasti
        outer = outer.f_back
    return frame.f_code, frame.f_lasti


@lru_cache(maxsize=4096)
def is_library_module(name: str) -> bool:
    """Whether that module is ours or torch's, and not the user's."""
    return f"{name}.".startswith(_OWN_PACKAGES)


def describe_line(code: CodeType, instruction: int) -> str:
    """`file:line in function` of the instruction of that offset."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    line = next(lines, None) or code.co_firstlineno
    try:
        name = os.path.relpath(code.co_filename) if os.path.isabs(code.co_filename) else code.co_filename
    except OSError:  # the working directory is gone, and this may be a rank that tells others what it does
        name = code.co_filename
    shown = code.co_filename if name.startswith("..") else name
    return f"{shown}:{line} in {code.co_name}"


def waits_for(state: RankState, states: Sequence[RankState]) -> list[int]:
    """The ranks that `state`'s rank needs before it can go on."""
    if state.left or not state.operation:
        return []
    if state.peer is not None:
        return [state.peer]
    by_rank = {other.rank: other for other in states}
    return [member for member in state.members if not _has_joined(by_rank.get(member), state)]


def _has_joined(other: RankState | None, state: RankState) -> bool:
    """Whether `other` has entered the same collective operation as `state`."""
    if other is None or other.left:
        return False
    same = other.communicator == state.communicator and other.peer is None and bool(other.operation)
    return same and other.sequence == state.sequence and other.operation == state.operation


def cycle(states: Sequence[RankState]) -> list[int]:
    """Ranks that wait for each other in a ring, its smallest first and again at the end; [] if there is none."""
    graph = {state.rank: waits_for(state, states) for state in states}
    finished: set[int] = set()
    for start in sorted(graph):
        ring = _walk(graph, start, [], finished)
        if ring:
            smallest = ring.index(min(ring))
            return [*ring[smallest:-1], *ring[:smallest], ring[smallest]]
    return []


def _walk(graph: dict[int, list[int]], rank: int, path: list[int], finished: set[int]) -> list[int]:
    if rank in path:
        return [*path[path.index(rank) :], rank]
    if rank in finished:
        return []
    path.append(rank)
    for needed in graph.get(rank, ()):
        found = _walk(graph, needed, path, finished)
        if found:
            return found
    path.pop()
    finished.add(rank)
    return []


def table(states: Sequence[RankState], reason: str) -> str:
    """The text that ends a stuck job: why, what each rank is doing, and the ring of ranks if there is one."""
    rows = [("rank", "host", "operation", "with", "tag", "seconds", "at")]
    rows += [_row(state, states) for state in sorted(states, key=lambda state: state.rank)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"torchmn: {reason}"]
    lines += ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    ring = cycle(states)
    if ring:
        lines.append("deadlock: " + " waits for ".join(f"rank {rank}" for rank in ring))
    else:
        lines += _missing(states)
    for name, report in reports.items():
        lines += report.lines({state.rank: state.reports[name] for state in states if name in state.reports})
    return "\n".join(lines)


def _row(state: RankState, states: Sequence[RankState]) -> tuple[str, ...]:
    if state.left:
        return (str(state.rank), state.host, "left", "", "", "", state.where)
    if not state.operation:
        return (str(state.rank), state.host, "user code", "", "", "", state.where or "no answer")
    if state.peer is not None:
        partner = f"rank {state.peer}"
    else:
        partner = "all" if len(state.members) == len(states) else f"ranks {ranks_text(state.members)}"
    tag = "" if state.tag is None else str(state.tag)
    return (str(state.rank), state.host, state.operation, partner, tag, f"{state.seconds:.1f}", state.where)


def _missing(states: Sequence[RankState]) -> list[str]:
    """The ranks that others wait for and that wait for nobody themselves; and the way out, where they have left."""
    waiting = [state for state in states if state.operation and not state.left]
    needed = {rank for state in states for rank in waits_for(state, states)}
    missing = sorted(needed - {state.rank for state in waiting})
    if not missing:
        return []
    lines = [f"the others wait for rank{'s' * (len(missing) > 1)} {ranks_text(missing)}"]
    if any(state.left for state in states if state.rank in missing) and any(state.peer is None for state in waiting):
        lines.append(
            "All ranks must make the same collective calls (steps, evaluations, saves), equally often: "
            "torchmn.scatter_dataset gives every rank equally many items."
        )
    return lines


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-2, 5` for [0, 1, 2, 5]."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
