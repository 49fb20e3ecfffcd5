"""Finds and ends all descendants of this process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from torchmn.cli.launch.rank_process import prctl

SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, see prctl(2)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent ends, so that `descendants` still finds them."""
    prctl(SET_CHILD_SUBREAPER, 1)


def descendants() -> list[int]:
    """Returns the ids of the running descendants of this process; empty without /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state parent ...": the name may contain spaces and parentheses.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # the process has ended meanwhile
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    found = list(children.get(os.getpid(), []))
    for pid in found:  # grows during the loop
        found.extend(children.get(pid, []))
    return found


def kill_descendants(sessions: Iterable[int], patience: float = 5.0) -> None:
    """Kills all descendants of this process, and the process groups `sessions`, for systems without /proc."""
    for session in sessions:
        send(session, signal.SIGKILL, group=True)
    deadline = time.monotonic() + patience
    # Repeated, because a process may fork during the search, and killed ones take a moment to end.
    while (living := descendants()) and time.monotonic() < deadline:
        for pid in living:
            send(pid, signal.SIGKILL)
        time.sleep(0.01)


def send(pid: int, signum: int, *, group: bool = False) -> None:
    """Sends a signal to a process, or to the group that it leads, if it still exists."""
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass
