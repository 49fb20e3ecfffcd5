"""A job of processes: its watchdog is started, and a rank that fails or leaves does not keep the others waiting.

`TORCHMN_ABORT=0` leaves exceptions and exits to the launcher; the watchdog's timeout stays on.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn, Protocol

from torchmn.communicators.launchers.addresses import LOOPBACK, of_this_host
from torchmn.communicators.watchdog.control_channel import MEETING_SECONDS, Line, Server
from torchmn.communicators.watchdog.monitor import Monitor, fate
from torchmn.communicators.watchdog.waits import ranks_text
from torchmn.context import here
from torchmn.errors import PeerError, TorchMNError


class World(Protocol):
    """The members of a `Communicator` that the watchdog uses before it is started."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def inter_size(self) -> int: ...
    @property
    def hosts(self) -> Sequence[str]: ...
    @property
    def group(self) -> Any: ...
    @property
    def buffers(self) -> Any: ...


CUT_OFF = "can not reach rank 0"  # what `torchmn doctor` looks for


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A block in which ranks meet for the first time, before there is a watchdog: the process ends if it hangs.

    Loading MPI may block with Python's lock held, so this must be a timer that needs no Python.
    """
    with suppress(Exception):  # stderr is no real file (a notebook): then there is no such timer
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def guard(world: World, end_transport: Callable[[int], None], meeting_place: str | None = None) -> None:
    """Start the watchdog of `world`, whose ranks are processes, and end the job when one of them raises.

    `meeting_place`: an address at which the ranks have met, which may be rank 0's.
    """
    if world.size == 1:
        return
    line, connected = _connect(world, meeting_place)
    watcher = Monitor(world.group.watch, world.hosts, line, end_transport)
    watcher.serves_others = connected and world.rank == 0
    if os.environ.get("TORCHMN_ABORT", "1") != "0":
        _end_job_on_exception(watcher)
        _report_threads(watcher)
        _remember_exit_status(watcher)
        _refuse_a_silent_exit(watcher)
    else:
        watcher.notices_departures = False
    atexit.register(_leave, watcher)
    watcher.start()
    world.group.owner = None  # those collective operations were ours: the user's first is yet to come


def _connect(world: World, meeting_place: str | None) -> tuple[Line | None, bool]:
    """This rank's line to the switchboard on rank 0, and whether all ranks have one. Rank 0 warns if they do not."""
    if world.inter_size == 1:
        line, troubles = _call(world, [LOOPBACK])
        if not any(troubles):
            return line, True
        # Containers with one name: they share neither a loopback interface nor perhaps a machine.
    addresses = [meeting_place] if meeting_place else []
    line, troubles = _call(world, [*addresses, *of_this_host()])
    cut_off = [rank for rank, trouble in enumerate(troubles) if trouble]
    if cut_off and world.rank == 0:
        print(
            f"torchmn: the watchdog of rank{'s' * (len(cut_off) > 1)} {ranks_text(cut_off)} {CUT_OFF} "
            f"({troubles[cut_off[0]]}). The job goes on; but if it gets stuck, the table will lack ranks, and a rank "
            "that leaves is missed only after the timeout. See 'the watchdog across hosts' in docs/troubleshooting.md.",
            file=sys.stderr,
        )
    return line, not cut_off


def _call(world: World, addresses: Sequence[str]) -> tuple[Line | None, list[str]]:
    """A line to a switchboard that rank 0 opens at its `addresses`; and what hindered each rank, "" where nothing."""
    offer: tuple[Sequence[str], int, str] | None = None
    trouble, line = "", None
    if world.rank == 0:
        try:
            server = Server(world.size, to_other_hosts=addresses != [LOOPBACK])
            offer = (addresses, server.port, server.key.hex())
        except OSError as error:
            trouble = f"it can not open a port: {error}"
    offer = json.loads(
        world.buffers.bcast_bytes(json.dumps(offer).encode(), 0)
    )  # the key goes over the transport alone
    # The whole meeting has to end within the timeout.
    patience = min(MEETING_SECONDS, world.group.settings.timeout / 4)
    if offer:
        try:
            where, port, key = offer
            line = Line(world.rank, where, port, bytes.fromhex(key), seconds=patience)
        except Exception as error:
            trouble = f"port {offer[1]} of {error}"
    # All of them: rank 0 may not run on to its end, where nobody is served, before all are connected.
    troubles = world.buffers.allgather_plain(trouble if line is None else "")
    if offer is None:
        troubles = [troubles[0]] * world.size
    return line, troubles


def _end_job_on_exception(watcher: Monitor) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if previous is not sys.__excepthook__ or watcher.process != os.getpid():
            previous(kind, error, trace)
        if watcher.process != os.getpid():  # a forked child's error is its own
            watcher.exit_status = 1
            return
        _end_job(watcher, kind, error, trace)

    sys.excepthook = hook


def _end_job(
    watcher: Monitor,
    kind: type[BaseException],
    error: BaseException | None,
    trace: TracebackType | None,
    where: str = "",
) -> None:
    """Print the exception that ended this rank, or a part of it, and end the job."""
    sys.stdout.flush()
    if issubclass(kind, PeerError):
        watcher.wait_for_the_cause()  # the rank that caused it reports more, and may be about to
    rank, size = watcher.watch.rank, watcher.size
    if watcher.first_to_raise():
        text = "".join(traceback.format_exception(kind, error, trace))
        fates = "".join(f"torchmn: {fate(departure)}\n" for departure in watcher.departures.values())
        sys.stderr.write(f"\ntorchmn: rank {rank} of {size} raised{where}; the job is ended:\n{text}{fates}")
    else:
        first_line = str(error).partition("\n")[0]
        sys.stderr.write(f"torchmn: rank {rank} of {size} raised too{where}: {kind.__name__}: {first_line}\n")
        sys.stderr.flush()
        time.sleep(2.0)  # the first one prints its traceback and ends the job
    watcher.end_job(130 if issubclass(kind, KeyboardInterrupt) else 1)


def _report_threads(watcher: Monitor) -> None:
    """Report exceptions that end threads of this rank; the job ends if the thread has communicated.

    Other ranks may wait for what such a thread would have done. Any other thread may be a library's that the training
    can do without: Python goes on after its end, and so does the rank.
    """
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        a_users = previous is not threading.__excepthook__
        if a_users or args.exc_type is SystemExit or watcher.process != os.getpid():
            previous(args)
        # At the rank's end, communicators are closed under threads that still use them.
        if args.exc_type is SystemExit or watcher.process != os.getpid() or watcher.leaving:
            return
        where = f" in thread {args.thread.name!r}" if args.thread else " in a thread"
        if here.watch is not None:
            _end_job(watcher, args.exc_type, args.exc_value, args.exc_traceback, where)
        elif not a_users:
            text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
            rank, size = watcher.watch.rank, watcher.size
            sys.stderr.write(
                f"\ntorchmn: rank {rank} of {size} raised{where}, which has not communicated; the job goes on:\n{text}"
            )

    threading.excepthook = hook


def _remember_exit_status(watcher: Monitor) -> None:
    """Let the job end with the status that this rank gives to sys.exit; Python tells it to nobody at exit."""
    python_exit = sys.exit

    def leave(status: Any = None, /) -> NoReturn:
        # As Python has it: None is success, a number itself, anything else is printed and means 1.
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends that thread and nothing else
            watcher.exit_status = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
        python_exit(status)

    sys.exit = leave


def _refuse_a_silent_exit(watcher: Monitor) -> None:
    """Let the job fail if this rank calls os._exit(0) in it: MPICH would kill the other ranks and report success."""
    python_exit = os._exit

    def leave(status: int) -> NoReturn:
        rank, size = watcher.watch.rank, watcher.size
        in_a_job = watcher.process == os.getpid() and any(not comm.group.closed for comm in watcher.watch.communicators)
        if status == 0 and in_a_job:
            status = 1
            sys.stderr.write(
                f"torchmn: rank {rank} of {size} called os._exit(0) without a word to the others; the job is ended "
                "with status 1. Let the script come to its end, or call comm.finalize() on every rank first.\n"
            )
            sys.stderr.flush()
        python_exit(status)

    os._exit = leave


def _leave(watcher: Monitor) -> None:
    """At exit: tell the others, deliver what is still on its way, and fall silent."""
    if watcher.process != os.getpid():  # a forked child goes in silence
        if watcher.notices_departures:
            # As children of multiprocessing do: MPI and gloo would end for the rank, too, and wait for the others.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(watcher.exit_status)
        return
    comms = list(watcher.watch.communicators)
    with suppress(TorchMNError):  # finalize will raise it again
        for comm in comms:  # before this rank waits for anybody, on any communicator
            if not comm.group.closed:
                comm.replies.decline_all()
    watcher.announce_departure()
    try:
        for comm in comms:
            comm.finalize()
    except TorchMNError as error:
        # A lost message must not look like a good end, and an exit handler can not raise.
        sys.stderr.write(f"torchmn: rank {watcher.watch.rank} of {watcher.size}, at its end: {error}\n")
        watcher.end_job(1)
    watcher.outlast_the_others()
    watcher.stop()
