"""Collective operations of a communicator belong to the thread that made the first one, until that thread ends.

Ranks match them by their order. Two threads of a rank would come in another order on each, and get each other's
numbers. So the second one raises, and the communicator is broken: no rank may take its next operation for another.
Messages from rank to rank have tags to tell them apart, and are free for all threads.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, NoReturn

import torch

from torchmn.communicators import watchdog
from torchmn.communicators.watchdog import Broken, Token, here
from torchmn.errors import PeerError, ThreadError

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator


def claim(comm: Communicator, operation: str) -> None:
    """Let the collective operations of `comm` belong to this thread, or raise if they belong to another.

    `Wait` calls it when the owner is not this thread: so it costs something once per thread and communicator.
    """
    watch = comm._watch
    if comm._closed or comm.size == 1 or operation == watchdog.FINALIZE:
        return  # `_check_open` finds the words for the first; the others do not meet anybody
    here.watch = watch
    with watch.claiming:
        broken = watch.broken.get(comm.name)
        owner = None if comm._owner is None else comm._owner()
        if broken is None:
            if _is_autograds():
                return
            if owner is None or _has_ended(owner):
                comm._owner = here.mark
                watch.claimed[comm.name] = comm
                return
    if broken is not None:
        _raise_broken(comm, operation, broken)
    assert owner is not None
    reason = _reason(comm, operation, owner)
    watch.mark_broken(comm.name, watch.rank, reason)
    if watch.announce is not None:
        watch.announce(comm.name, reason)
    raise ThreadError(reason)


def _is_autograds() -> bool:
    """Whether autograd started this thread, as it does for GPUs: whoever called backward waits for it meanwhile.

    A backward of the CPU runs in the thread that called it, and must be the owner as in forward.
    """
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and isinstance(threading.current_thread(), threading._DummyThread)


def _has_ended(owner: Token) -> bool:
    # Threads that Python did not start have a stand-in, which can not say it: their tokens end with them.
    return not isinstance(owner.thread, threading._DummyThread) and not owner.thread.is_alive()


def _reason(comm: Communicator, operation: str, owner: Token) -> str:
    where = watchdog.user_line(sys._getframe())
    return (
        f"rank {comm.rank} of {comm.size}: {operation} of communicator {comm.name!r} in thread "
        f"{threading.current_thread().name!r}, at {where}: expected thread {owner.thread.name!r}, which made the first "
        "collective operation of this communicator and has not ended. Collective operations of two threads meet those "
        "of other ranks in any order, and mix up their numbers. Give each thread a communicator of its own, made on "
        "all ranks before the threads start: own = comm.split(0, comm.rank)"
    )


def _raise_broken(comm: Communicator, operation: str, broken: Broken) -> NoReturn:
    kind = ThreadError if broken.rank == comm._watch.rank else PeerError
    raise kind(
        f"rank {comm.rank} of {comm.size}: {operation}: communicator {comm.name!r} can not be used for collective "
        f"operations any more, because two threads of a rank used it: {broken.reason}"
    )
