"""Every process below this one, so that none is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from torchmn.cli.launch.rank_process import prctl

SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, see prctl(2)


def adopt_orphans() -> None:
    """Makes processes below us ours when their parent ends, so that `descendants` still finds them."""
    prctl(SET_CHILD_SUBREAPER, 1)


def descendants() -> list[int]:
    """The living processes below this one, as far as /proc tells."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state parent ...": the name may itself hold spaces and parentheses.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    found = list(children.get(os.getpid(), []))
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, []))
    return found


def kill_descendants(sessions: Iterable[int], patience: float = 5.0) -> None:
    """Kills every process below this one, and the `sessions` that we started where there is no /proc."""
    for session in sessions:
        send(session, signal.SIGKILL, group=True)
    deadline = time.monotonic() + patience
    # Again and again: a process may fork while we walk the tree. Killed ones take a moment to end.
    while (living := descendants()) and time.monotonic() < deadline:
        for pid in living:
            send(pid, signal.SIGKILL)
        time.sleep(0.01)


def send(pid: int, signum: int, *, group: bool = False) -> None:
    """Signals a process, or the group that it leads, if it still exists."""
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass
