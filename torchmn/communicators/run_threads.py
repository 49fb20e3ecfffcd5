"""run_threads: a function on several ranks inside this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.transports.group import Group, Settings
from torchmn.communicators.transports.threads import Meeting, ThreadTransport, ThreadWorld
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
    """Run `fn(comm)` on `size` ranks inside this process; return the results in rank order.

    An exception on one rank frees the others and is raised here. `hosts` gives each rank a host name, so that
    topology can be tried without machines. Threads share torch's random state: `torch.manual_seed` inside of `fn` is a
    race. Make models before, or draw from a `torch.Generator` of your own.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise ArgumentError(f"run_threads: expected size to be an int, got {size!r}")
    hosts = ["localhost"] * size if hosts is None else list(hosts)
    if size < 1 or len(hosts) != size:
        raise ArgumentError(
            f"run_threads: expected size >= 1 and one host per rank, got size {size}, {len(hosts)} hosts"
        )
    world = ThreadWorld(hosts)
    meeting = Meeting(world, range(size))
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def note(rank: int, error: BaseException) -> None:
        errors.append((rank, error))
        world.fail(f"rank {rank} of {size} raised {type(error).__name__}: {error}")

    def rank_main(rank: int) -> None:
        world.watches[rank].main_thread = threading.get_ident()
        settings = Settings(grad_dtype=grad_dtype)
        if timeout is not None:
            settings.timeout = timeout
        group = Group.of_world("world", hosts, world.watches[rank], settings)
        comm = Communicator(ThreadTransport(group, meeting))
        here.communicator = comm
        try:
            results[rank] = fn(comm)
            _settle([each for each in world.watches[rank].communicators if not each.group.closed])
            world.leave(rank)
        except BaseException as error:
            note(rank, error)

    ranks = [threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    done = threading.Event()
    watcher = threading.Thread(target=world.watch, args=(done,), name="torchmn watchdog", daemon=True)
    try:
        with _threads_that_fail(world, note):
            for thread in (*ranks, watcher):
                thread.start()
            for thread in ranks:
                while thread.is_alive():
                    thread.join(0.5)
                    if world.timed_out:
                        thread.join(5.0)  # a rank asleep in user code cannot be woken; it is left behind
                        break
    except KeyboardInterrupt:
        world.fail("interrupted while ranks were running")  # or they would go on, in a notebook for hours
        raise
    finally:
        done.set()
        if watcher.is_alive():  # a thread that runs while Python ends may abort the process
            watcher.join()
    if errors:
        _raise_first(errors, size)
    if world.timed_out:
        raise WaitTimeout(world.failure)
    return results


@contextmanager
def _threads_that_fail(world: ThreadWorld, note: Callable[[int, BaseException], None]) -> Iterator[None]:
    """A block in which an exception that ends a thread is noted for the rank for which that thread communicated."""
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        rank = next((watch.rank for watch in world.watches if watch is here.watch), None)
        if rank is None or args.exc_type is SystemExit or args.exc_value is None:
            previous(args)
        else:
            note(rank, args.exc_value)

    threading.excepthook = hook
    try:
        yield
    finally:
        if threading.excepthook is hook:  # else another world, in another thread, has begun meanwhile
            threading.excepthook = previous


def _settle(comms: Sequence[Communicator]) -> None:
    """What `finalize` does for replies that are still owed: all ranks decline before they wait."""
    for comm in comms:
        comm.replies.decline_all()
    for comm in comms:
        if comm.replies.handler is not None:
            comm.replies.handler.settle()


def _raise_first(errors: list[tuple[int, BaseException]], size: int) -> None:
    """Raise the error that began it, with its rank noted; errors that only follow from it stay silent."""
    # Ranks that a broken communicator frees may be faster than the thread that broke it.
    rank, error = next((each for each in errors if isinstance(each[1], ThreadError)), errors[0])
    if hasattr(error, "add_note"):  # not in Python 3.10
        error.add_note(f"(raised on rank {rank} of {size})")  # type: ignore[attr-defined]
    raise error
