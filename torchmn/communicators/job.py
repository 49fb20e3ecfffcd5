"""A job of processes: its watchdog is started, and a rank that fails or leaves does not keep the others waiting.

`TORCHMN_ABORT=0` leaves exceptions and exits to the launcher; the watchdog's timeout stays on.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from torchmn.communicators import monitor as monitors
from torchmn.communicators.monitor import Monitor

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator


def guard(world: Communicator, end_job: Callable[[int], None]) -> None:
    """Start the watchdog of `world`, whose ranks are processes, and end the job when one of them raises."""
    if world.size == 1:
        return
    one_host = world.inter_size == 1
    store, address = None, None
    if world.rank == 0:
        host = "127.0.0.1" if one_host else world._hosts[0]
        try:
            store = monitors.open_store(host)
            address = (host, store.port)
        except Exception as error:
            print(f"torchmn: no watchdog across ranks, rank 0 can not open a port: {error}", file=sys.stderr)
    address = world.bcast_obj(address)
    if address is not None and world.rank != 0:
        try:
            store = monitors.join_store(*address)
        except Exception as error:
            print(f"torchmn: rank {world.rank} is outside the watchdog: {error}", file=sys.stderr)
    watcher = Monitor(world._watch, world.size, store, end_job)
    if os.environ.get("TORCHMN_ABORT", "1") != "0":
        _end_job_on_exception(watcher)
    else:
        watcher.notices_departures = False
    atexit.register(_leave, watcher)
    watcher.start()


def _end_job_on_exception(watcher: Monitor) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if previous is not sys.__excepthook__:
            previous(kind, error, trace)
        sys.stdout.flush()
        rank, size = watcher.watch.rank, watcher.size
        if watcher.first_to("traceback"):
            text = "".join(traceback.format_exception(kind, error, trace))
            sys.stderr.write(f"\ntorchmn: rank {rank} of {size} raised; the job is ended:\n{text}")
        else:
            first_line = str(error).partition("\n")[0]
            sys.stderr.write(f"torchmn: rank {rank} of {size} raised too: {kind.__name__}: {first_line}\n")
        watcher.end_job(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def _leave(watcher: Monitor) -> None:
    """At exit: tell the others, deliver what is still on its way, and fall silent."""
    watcher.announce_departure()
    for comm in list(watcher.watch.communicators):
        comm.finalize()
    watcher.stop()
