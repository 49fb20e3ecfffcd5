"""A process that a rank forks (a worker of a DataLoader, say) is no rank: its communicators refuse to work.

It has a copy of everything, of the connections to other ranks too. If it spoke, they would take it for the rank
itself, which waits for answers that never come or gets another's; and there is no watchdog in it.
"""

from __future__ import annotations

import os

from torchmn.context import process


def disown() -> None:
    """Close, without a word to other ranks, the communicators of the rank that this process was forked from."""
    for watch in list(process.watches):
        for comm in list(watch.communicators):
            if comm.size > 1 and not comm.group.closed:
                comm.group.closed = True
                comm.group.closed_because = (
                    "in a process that was forked from this rank, and is no rank (a worker of a DataLoader?): "
                    "communicate in the rank itself, and give its workers what they need before they start"
                )


if hasattr(os, "register_at_fork"):  # not on Windows, which can not fork
    os.register_at_fork(after_in_child=disown)
