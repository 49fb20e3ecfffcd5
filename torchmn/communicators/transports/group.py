"""`Group`, one rank's membership in a group of ranks, and `Settings`, the options of a communicator.

A communicator, its transport and the watchdog share one `Group`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn
from weakref import ref

import torch

from torchmn._torch_compat import current_backward
from torchmn.communicators.messages import wire
from torchmn.communicators.watchdog.source_lines import user_line
from torchmn.communicators.watchdog.waits import FINALIZE, Broken, Watch
from torchmn.context import Token, here
from torchmn.errors import ArgumentError, PeerError, ThreadError, TorchMNError
from torchmn.optional import FUSION

DEFAULT_TIMEOUT = 300.0
NO_TIMEOUT = 365 * 24 * 3600.0  # seconds; infinity would overflow the deadlines of gloo and of timers


def default_timeout() -> float:
    """Returns the seconds that a wait may last: `TORCHMN_TIMEOUT`, or 300."""
    text = os.environ.get("TORCHMN_TIMEOUT") or str(DEFAULT_TIMEOUT)
    try:
        number: float | str = math.inf if text == "off" else float(text)
    except ValueError:
        number = text
    return seconds_of(number, "TORCHMN_TIMEOUT")


def seconds_of(timeout: object, name: str) -> float:
    """Returns a limit of waits in seconds; infinity, which means without a limit, becomes a year.

    Args:
        timeout: a number of seconds.
        name: of the option, for the message.

    Raises:
        ArgumentError: `timeout` is not a number above 0.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ArgumentError(
            f"{name}: expected seconds > 0, got {timeout!r}. For waits without a limit: TORCHMN_TIMEOUT=off, or "
            "timeout=math.inf"
        )
    return min(float(timeout), NO_TIMEOUT)


def checks_by_default() -> bool:
    """Returns whether ranks compare their arguments before they communicate: yes, unless `TORCHMN_CHECKS=0`."""
    return os.environ.get("TORCHMN_CHECKS", "1") != "0"


@dataclass
class Settings:
    """Options of a communicator; `split` copies them to the new one."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    grad_dtype: torch.dtype | None = None
    timeout: float = field(default_factory=default_timeout)
    checks: bool = field(default_factory=checks_by_default)
    max_message_bytes: int = wire.DEFAULT_MAX_MESSAGE_BYTES

    def switches(self) -> dict[str, bool]:
        """Returns the switches that must be equal on all ranks, by environment variable."""
        return {"TORCHMN_CHECKS": self.checks, "TORCHMN_FUSION": FUSION}


@dataclass(eq=False)
class Group:
    """Rank `rank` of the group called `name`; rank i of it is `world_ranks[i]` of the job and runs on `hosts[i]`.

    Attributes:
        watch: the waits of this rank, in all of its groups.
        collectives: number of collective operations that this rank has entered; by it the watchdog finds ranks that are
            behind.
        splits: number of groups that were split off.
        closed: whether the communicator was finalized, or must not be used in this process.
        closed_because: the reason, for error messages.
        owner: token of the thread to which collective operations belong; see `claim`.
    """

    name: str
    rank: int
    hosts: tuple[str, ...]
    world_ranks: tuple[int, ...]
    watch: Watch
    settings: Settings
    collectives: int = 0
    splits: int = 0
    closed: bool = False
    closed_because: str = "on a communicator that was finalized"
    owner: ref[Token] | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.hosts)

    @staticmethod
    def of_world(name: str, hosts: Sequence[str], watch: Watch, settings: Settings) -> Group:
        """Returns the group of all ranks that were started together, for the rank that `watch` belongs to."""
        return Group(name, watch.rank, tuple(hosts), tuple(range(len(hosts))), watch, settings)

    def among(self, members: Sequence[int], name: str) -> Group:
        """Returns a new group of `members`, which are ranks of this one, with a copy of its settings."""
        hosts = tuple(self.hosts[member] for member in members)
        world_ranks = tuple(self.world_ranks[member] for member in members)
        return Group(name, members.index(self.rank), hosts, world_ranks, self.watch, replace(self.settings))

    def check_open(self, operation: str) -> None:
        """Raises if the communicator of this group is closed."""
        if self.closed:
            raise TorchMNError(f"rank {self.rank} of {self.size}: {operation} {self.closed_because}")

    def claim(self, operation: str) -> None:
        """Makes this thread the owner of the group's collective operations.

        They belong to the thread that made the first one, until that thread ends. Ranks match collective operations by
        their order, and the order of two threads may differ between ranks, which would mix up their results. So a
        second thread raises, and the communicator is broken on all ranks. Any thread may send point-to-point messages,
        which are matched by tag.

        Raises:
            ThreadError: they belong to another thread, or two threads of this rank have broken the communicator.
            PeerError: two threads of another rank have broken it.
        """
        watch = self.watch
        if self.closed or self.size == 1 or operation == FINALIZE:
            return  # `check_open` raises for the first; the others need no other rank
        here.watch = watch
        with watch.claiming:
            broken = watch.broken.get(self.name)
            owner = None if self.owner is None else self.owner()
            if broken is None:
                if _is_autograd_thread():
                    return
                if owner is None or _has_ended(owner):
                    self.owner = here.mark
                    watch.claimed[self.name] = self
                    return
        if broken is not None:
            self._raise_broken(operation, broken)
        assert owner is not None
        reason = self._second_thread_text(operation, owner)
        watch.mark_broken(self.name, watch.rank, reason)
        if watch.announce is not None:
            watch.announce(self.name, reason)
        raise ThreadError(reason)

    def _second_thread_text(self, operation: str, owner: Token) -> str:
        return (
            f"rank {self.rank} of {self.size}: {operation} of communicator {self.name!r} in thread "
            f"{threading.current_thread().name!r}, at {user_line()}: expected thread {owner.thread.name!r}, which made "
            "the first collective operation of this communicator and has not ended. Collective operations of two "
            "threads are matched with those of other ranks in any order, which mixes up their results. Give each "
            "thread its own communicator, made on all ranks before the threads start: own = comm.split(0, comm.rank)"
        )

    def _raise_broken(self, operation: str, broken: Broken) -> NoReturn:
        kind = ThreadError if broken.rank == self.watch.rank else PeerError
        raise kind(
            f"rank {self.rank} of {self.size}: {operation}: communicator {self.name!r} cannot be used for collective "
            f"operations any more, because two threads of a rank used it: {broken.reason}"
        )


def _is_autograd_thread() -> bool:
    """Returns whether autograd started this thread, as it does for GPUs, while the caller of backward waits for it.

    A backward on the CPU runs in the thread that called it, which must be the owner, as in forward.
    """
    in_backward = current_backward() != -1
    return in_backward and isinstance(threading.current_thread(), threading._DummyThread)


def _has_ended(owner: Token) -> bool:
    # `_DummyThread`, of threads that Python did not start, has no usable `is_alive`; their tokens end with them.
    return not isinstance(owner.thread, threading._DummyThread) and not owner.thread.is_alive()
