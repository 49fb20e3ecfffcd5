"""`run_threads`, which runs a function on several ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.transports.group import Group, Settings, seconds_of
from torchmn.communicators.transports.threads import ThreadGroup, ThreadTransport, ThreadWorld
from torchmn.context import here
from torchmn.errors import ArgumentError, ThreadError, WaitTimeout

Result = TypeVar("Result")


def run_threads(
    fn: Callable[[Communicator], Result],
    size: int,
    hosts: Sequence[str] | None = None,
    *,
    timeout: float | None = None,
    grad_dtype: torch.dtype | None = None,
) -> list[Result]:
    """Runs `fn(comm)` on `size` ranks, each a thread of this process, and returns the results in rank order.

    Threads share torch's random state: `torch.manual_seed` inside of `fn` is a race. Create models before, or draw from
    one `torch.Generator` per rank.

    Args:
        fn: called on every rank with its communicator.
        size: number of ranks.
        hosts: a host name per rank, to try topologies without several machines; by default all are `localhost`.
        timeout: seconds that a wait may last; by default `TORCHMN_TIMEOUT` or 300. `math.inf`: without a limit.
        grad_dtype: dtype in which gradients are sent, as in `create_communicator`.

    Returns:
        What `fn` returned on each rank.

    Raises:
        ArgumentError: `size`, `hosts` or `timeout` cannot be right.
        WaitTimeout: a wait exceeded the timeout; the message is the table of all ranks.
        Exception: the exception of the rank that failed first; the other ranks are ended.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise ArgumentError(f"run_threads: expected size to be an int, got {size!r}")
    hosts = ["localhost"] * size if hosts is None else list(hosts)
    if size < 1 or len(hosts) != size:
        raise ArgumentError(
            f"run_threads: expected size >= 1 and one host per rank, got size {size}, {len(hosts)} hosts"
        )
    settings = Settings(grad_dtype=grad_dtype)
    if timeout is not None:
        settings.timeout = seconds_of(timeout, "run_threads: timeout")
    run = _ThreadRun(fn, hosts, settings)
    run.run()
    if run.errors:
        _raise_first(run.errors, size)
    if run.world.timed_out:
        raise WaitTimeout(run.world.failure)
    return run.results


class _ThreadRun:
    """The threads of one `run_threads`, their results, and their exceptions in the order in which they were raised."""

    def __init__(self, fn: Callable[[Communicator], Any], hosts: Sequence[str], settings: Settings):
        self.world = ThreadWorld(hosts)
        self.results: list[Any] = [None] * len(hosts)
        self.errors: list[tuple[int, BaseException]] = []
        self._fn = fn
        self._hosts = hosts
        self._settings = settings
        self._shared = ThreadGroup(self.world, range(len(hosts)))

    def run(self) -> None:
        """Runs all ranks, and returns when they have ended or a wait has exceeded its timeout."""
        ranks = [
            threading.Thread(target=self._run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(len(self._hosts))
        ]
        done = threading.Event()
        watchdog = threading.Thread(target=self.world.watch, args=(done,), name="torchmn-watchdog", daemon=True)
        try:
            with _recorded_thread_exceptions(self.world, self.record):
                for thread in (*ranks, watchdog):
                    thread.start()
                for thread in ranks:
                    self._join(thread)
        except KeyboardInterrupt:
            self.world.fail("interrupted while ranks were running")  # or they would continue, in a notebook for hours
            raise
        finally:
            done.set()
            if watchdog.is_alive():  # a thread that runs while Python ends may abort the process
                watchdog.join()

    def record(self, rank: int, error: BaseException) -> None:
        """Records the exception of a rank, and makes all other ranks raise."""
        self.errors.append((rank, error))
        self.world.fail(f"rank {rank} of {len(self._hosts)} raised {type(error).__name__}: {error}")

    def _run_rank(self, rank: int) -> None:
        watch = self.world.watches[rank]
        watch.main_thread = threading.get_ident()
        group = Group.of_world("world", self._hosts, watch, replace(self._settings))
        comm = Communicator(ThreadTransport(group, self._shared))
        here.communicator = comm
        try:
            self.results[rank] = self._fn(comm)
            _drain([each for each in watch.communicators if not each.group.closed])
            self.world.leave(rank)
        except BaseException as error:
            self.record(rank, error)
            for each in watch.communicators:
                each.background.close()

    def _join(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            thread.join(0.5)
            if self.world.timed_out:
                thread.join(5.0)  # a rank that blocks in user code cannot be interrupted; its thread remains
                return


@contextmanager
def _recorded_thread_exceptions(world: ThreadWorld, record: Callable[[int, BaseException], None]) -> Iterator[None]:
    """In this block, an exception that ends a user's thread is recorded for the rank for which it communicated."""
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        rank = next((watch.rank for watch in world.watches if watch is here.watch), None)
        if rank is None or args.exc_type is SystemExit or args.exc_value is None:
            previous(args)
        else:
            record(rank, args.exc_value)

    threading.excepthook = hook
    try:
        yield
    finally:
        if threading.excepthook is hook:  # else another `run_threads`, in another thread, has set its hook
            threading.excepthook = previous


def _drain(comms: Sequence[Communicator]) -> None:
    """Waits for background tasks, declines the requests that got no reply, and waits for the replies to this rank's."""
    for comm in comms:
        comm.background.finish()
    for comm in comms:
        comm.replies.decline_all()
    for comm in comms:
        if comm.replies.handler is not None:
            comm.replies.handler.drain()


def _raise_first(errors: list[tuple[int, BaseException]], size: int) -> None:
    """Raises the first error, with a note of its rank; the others are its consequences."""
    # Ranks that wait in a broken communicator may raise before the thread that broke it.
    rank, error = next((each for each in errors if isinstance(each[1], ThreadError)), errors[0])
    add_note = getattr(error, "add_note", None)  # not in Python 3.10
    if add_note is not None:
        add_note(f"(raised on rank {rank} of {size})")
    raise error
