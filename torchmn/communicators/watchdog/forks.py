"""Closes the communicators in processes that a rank forks, such as the workers of a DataLoader.

A forked process has copies of the connections to other ranks, which would take its messages for those of the rank
itself: the rank would wait for replies that never come, or get another's. No watchdog runs in it.
"""

from __future__ import annotations

import os

from torchmn.context import process


def close_inherited_communicators() -> None:
    """Closes the communicators of the rank that this process was forked from, without sending anything."""
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
