"""Starts the watchdog of a rank that is a process, and hooks into Python's exceptions and exits.

The hooks end the whole job when one rank raises, and announce a rank that leaves. `TORCHMN_ABORT=0` leaves exceptions
and exits to the launcher; the watchdog's timeout stays on.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
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
from torchmn.communicators.watchdog.control_channel import CONNECT_SECONDS, CUT_OFF, ControlClient, ControlServer
from torchmn.communicators.watchdog.monitor import Monitor
from torchmn.communicators.watchdog.observer import Observer
from torchmn.communicators.watchdog.report import departure_text, ranks_text
from torchmn.context import here
from torchmn.errors import DOCUMENTATION, PeerError, TorchMNError

_logger = logging.getLogger("torchmn.watchdog")


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
    def finalize(self) -> None: ...


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends the process if the block takes longer: for the first contact between ranks, before there is a watchdog.

    Loading MPI may block while it holds the GIL, so the timer must not need Python.
    """
    with suppress(Exception):  # stderr is not a file (in a notebook): then there is no such timer
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def start_watchdog(
    world: World,
    end_transport: Callable[[int], None],
    rendezvous: str | None = None,
    observer: Observer | None = None,
) -> None:
    """Starts the watchdog of `world`, whose ranks are processes, and ends the job when one of them raises.

    Args:
        world: the communicator of all ranks. All of them must call.
        end_transport: ends all processes with an exit status, if the transport can.
        rendezvous: address at which the ranks have found each other, which may be rank 0's.
        observer: of this rank, if its launcher may end the job without naming the rank that failed.
    """
    if world.size == 1:
        atexit.register(_finalize, world, os.getpid())
        return
    ends_jobs = os.environ.get("TORCHMN_ABORT", "1") != "0"
    if observer is not None and ends_jobs:
        observer.report_exits(world.rank, world.hosts, world.buffers.allgather_plain(os.getpid()))
    channel, complete = _open_channel(world, rendezvous)  # also a barrier: the observers are ready
    monitor = Monitor(world.group.watch, world.hosts, channel, end_transport, world.group.settings.timeout)
    monitor.serves_others = complete and world.rank == 0
    monitor.observer = observer
    if ends_jobs:
        _end_job_on_exception(monitor)
        _report_threads(monitor)
        _report_exit_handlers(monitor)
        _record_exit_status(monitor)
        _report_early_exit(monitor)
        if not faulthandler.is_enabled():
            with suppress(Exception):  # stderr is not a file (in a notebook)
                faulthandler.enable()  # a crash prints the line of Python
    else:
        monitor.notices_departures = False
    atexit.register(_leave, monitor)
    monitor.start()
    world.group.owner = None  # the collective operations so far were ours: the user's first one determines the owner


def _finalize(world: World, process: int) -> None:
    """Exit handler of a world of one: torch aborts processes that end while threads of a process group run."""
    if os.getpid() == process:
        world.finalize()


def _open_channel(world: World, rendezvous: str | None) -> tuple[ControlClient | None, bool]:
    """Returns this rank's end of the control channel, and whether all ranks have one. Rank 0 warns if they do not."""
    if world.inter_size == 1:
        channel, failures = _connect(world, [LOOPBACK])
        if not any(failures):
            return channel, True
        # Containers with one host name may share neither a loopback interface nor a machine.
    addresses = [rendezvous] if rendezvous else []
    channel, failures = _connect(world, [*addresses, *of_this_host()])
    cut_off = [rank for rank, failure in enumerate(failures) if failure]
    if cut_off and world.rank == 0:
        _logger.warning(
            f"torchmn: the watchdog of rank{'s' * (len(cut_off) > 1)} {ranks_text(cut_off)} {CUT_OFF} "
            f"({failures[cut_off[0]]}). The job continues; but if it gets stuck, the table will lack ranks, and a rank "
            "that leaves is reported only after the timeout. See 'the watchdog across hosts' in "
            f"{DOCUMENTATION}/troubleshooting.html"
        )
    return channel, not cut_off


def _connect(world: World, addresses: Sequence[str]) -> tuple[ControlClient | None, list[str]]:
    """Returns a connection to a server that rank 0 opens at its `addresses`; and each rank's failure, "" for none."""
    offer: tuple[Sequence[str], int, str] | None = None
    failure, channel = "", None
    if world.rank == 0:
        try:
            server = ControlServer(world.size, to_other_hosts=addresses != [LOOPBACK])
            offer = (addresses, server.port, server.key.hex())
        except OSError as error:
            failure = f"it cannot open a port: {error}"
    # By the transport: the key must not be sent over a connection that others can open.
    offer = json.loads(world.buffers.bcast_bytes(json.dumps(offer).encode(), 0))
    # Two attempts and their exchanges have to end within the timeout.
    seconds = min(CONNECT_SECONDS, world.group.settings.timeout / 4)
    if offer:
        try:
            server_addresses, port, key = offer
            channel = ControlClient(world.rank, server_addresses, port, bytes.fromhex(key), seconds=seconds)
        except Exception as error:
            failure = f"port {offer[1]} of {error}"
    # Also a barrier: rank 0, which runs the server, must not end before all ranks are connected.
    failures = world.buffers.allgather_plain(failure if channel is None else "")
    if offer is None:
        failures = [failures[0]] * world.size
    return channel, failures


def _end_job_on_exception(monitor: Monitor) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if previous is not sys.__excepthook__ or monitor.process != os.getpid():
            previous(kind, error, trace)
        if monitor.process != os.getpid():  # an error in a forked process does not end the job
            monitor.exit_status = 1
            return
        _end_job(monitor, kind, error, trace)

    sys.excepthook = hook


def _end_job(
    monitor: Monitor,
    kind: type[BaseException],
    error: BaseException | None,
    trace: TracebackType | None,
    where: str = "",
) -> None:
    """Prints the exception that ended this rank, or its first line if another rank raised first, and ends the job."""
    sys.stdout.flush()
    if issubclass(kind, PeerError):
        monitor.wait_for_root_cause()  # so that the rank that failed first prints its traceback
    rank, size = monitor.watch.rank, monitor.size
    if monitor.is_first_to_raise():
        text = "".join(traceback.format_exception(kind, error, trace))
        left = "".join(f"torchmn: {departure_text(departure)}\n" for departure in monitor.departures.values())
        sys.stderr.write(f"\ntorchmn: rank {rank} of {size} raised{where}; the job is ended:\n{text}{left}")
    else:
        first_line = str(error).partition("\n")[0]
        sys.stderr.write(f"torchmn: rank {rank} of {size} raised too{where}: {kind.__name__}: {first_line}\n")
        sys.stderr.flush()
        time.sleep(2.0)  # the first one prints its traceback and ends the job
    monitor.end_job(130 if issubclass(kind, KeyboardInterrupt) else 1)


def _report_threads(monitor: Monitor) -> None:
    """Reports exceptions that end threads of this rank; the job ends if the thread has communicated.

    Other ranks may wait for what such a thread would have done. Any other thread may belong to a library, and the
    training may not need it: the rank continues, as Python does.
    """
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        has_own_hook = previous is not threading.__excepthook__
        if has_own_hook or args.exc_type is SystemExit or monitor.process != os.getpid():
            previous(args)
        # When a rank leaves, communicators are closed while threads may still use them.
        if args.exc_type is SystemExit or monitor.process != os.getpid() or monitor.leaving:
            return
        where = f" in thread {args.thread.name!r}" if args.thread else " in a thread"
        if here.watch is not None:
            _end_job(monitor, args.exc_type, args.exc_value, args.exc_traceback, where)
        elif not has_own_hook:
            text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
            raised = f"torchmn: rank {monitor.watch.rank} of {monitor.size} raised{where}, which has not communicated"
            sys.stderr.write(f"\n{raised}; the job continues:\n{text}")

    threading.excepthook = hook


def _report_exit_handlers(monitor: Monitor) -> None:
    """Adds the rank to Python's traceback of an exception in an exit handler, which does not end the job."""
    previous = sys.unraisablehook

    def hook(args: sys.UnraisableHookArgs) -> None:
        if "atexit" in (args.err_msg or "") and monitor.process == os.getpid():
            sys.stderr.write(f"torchmn: rank {monitor.watch.rank} of {monitor.size} raised in an exit handler:\n")
        previous(args)

    sys.unraisablehook = hook


def _record_exit_status(monitor: Monitor) -> None:
    """Records the status that this rank passes to sys.exit, which Python does not pass to exit handlers."""
    python_exit = sys.exit

    def leave(status: Any = None, /) -> NoReturn:
        # As in Python: None is success, an int is the status, anything else is printed and means 1.
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends only that thread
            monitor.exit_status = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
        python_exit(status)

    sys.exit = leave


def _report_early_exit(monitor: Monitor) -> None:
    """Reports that this rank calls os._exit in the job: launchers end the other ranks without a word.

    MPICH's would even report success if the status is 0.
    """
    python_exit = os._exit

    def leave(status: int) -> NoReturn:
        in_a_job = monitor.process == os.getpid() and any(not comm.group.closed for comm in monitor.watch.communicators)
        if in_a_job and not monitor.ending:
            sys.stderr.write(
                f"torchmn: rank {monitor.watch.rank} of {monitor.size} called os._exit({status}) before "
                f"comm.finalize(); the job is ended with status {status or 1}. Let the script run to its end, or call "
                "comm.finalize() on every rank first.\n"
            )
            sys.stderr.flush()
            monitor.announce_end()
            status = status or 1
        python_exit(status)

    os._exit = leave


def _leave(monitor: Monitor) -> None:
    """Exit handler: announces this rank's exit, flushes pending sends, disconnects the watchdog."""
    if monitor.process != os.getpid():  # a forked process does not report
        if monitor.notices_departures:
            # As multiprocessing's children do: the exit handlers of MPI and gloo would wait for the other ranks.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(monitor.exit_status)
        return
    comms = list(monitor.watch.communicators)
    with suppress(TorchMNError):  # finalize will raise it again
        for comm in comms:  # before this rank waits for another, on any communicator
            if not comm.group.closed:
                comm.replies.decline_all()
    monitor.announce_departure()
    try:
        for comm in comms:
            comm.finalize()
    except TorchMNError as error:
        # A lost message must not look like success, and an exit handler cannot raise.
        sys.stderr.write(f"torchmn: rank {monitor.watch.rank} of {monitor.size}, in its exit handler: {error}\n")
        monitor.end_job(1)
    monitor.serve_until_all_left()
    monitor.disconnect()
