"""One rank of a worker pool: waits for test bodies, runs each on a separate communicator, and reports.

Started as `python -m tests._worlds.worker TRANSPORT DIRECTORY` by pool.py, which listens at DIRECTORY/socket.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests._worlds.loading import find_test, load_test_module

STACK_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class Run:
    """A request: run this test body."""

    module: str
    path: str
    test: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Hello:
    """The greeting of a rank."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Outcome:
    """What became of a test's body on one rank: 'passed', 'skipped' or 'failed', and the reason why."""

    status: str
    text: str = ""


def main(transport: str, directory: Path) -> None:
    import torchmn

    channel = connect(directory / "socket")
    world = torchmn.create_communicator("mpi" if transport == "openmpi" else transport)
    stacks = open(directory / f"stack-{world.rank}", "w")  # noqa: SIM115  (open as long as the process lives)
    # A dump from C, in the signal handler: it works while the rank waits inside MPI or gloo.
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    channel.send(Hello(world.rank, os.getpid()))
    # The connection ends when pytest has finished, or has died.
    with contextlib.suppress(EOFError, ConnectionError):
        serve(channel, world)
    # Not sys.exit: a failed test may have left the world in a state in which a tidy end would wait for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(channel: Connection, world: Any) -> None:
    """Runs requests until the connection closes: one report for the body, one more for its tidy end."""
    while True:
        comm, outcome = run_body(channel.recv(), world)
        report(channel, outcome)
        if outcome.status == "passed":
            # At once, not when all have passed: a rank still in the body may wait for what this one has sent.
            report(channel, close(comm))


def report(channel: Connection, outcome: Outcome) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send(outcome)


def run_body(request: Run, world: Any) -> tuple[Any, Outcome]:
    comm = None
    try:
        body = find_test(load_test_module(request.module, request.path), request.test)
        # A new communicator for each test: messages that a failed test left behind cannot reach the next one.
        comm = world.split(0, world.rank)
        body(comm=comm, **request.arguments)
    except pytest.skip.Exception as skipped:
        return comm, Outcome("skipped", str(skipped))
    except BaseException as error:  # a rank that calls sys.exit must report it, too
        return comm, Outcome("failed", readable(error))
    finally:
        for argument in request.arguments.values():
            if isinstance(argument, pytest.MonkeyPatch):  # pytest undoes what was done in its own process
                argument.undo()
    return comm, Outcome("passed")


def close(comm: Any) -> Outcome:
    try:
        comm.finalize()
    except BaseException as error:
        return Outcome("failed", "in comm.finalize() after the test's body:\n" + readable(error))
    return Outcome("passed")


def readable(error: BaseException) -> str:
    """The traceback without this file's own frame at its top."""
    frames = error.__traceback__.tb_next if error.__traceback__ and error.__traceback__.tb_next else None
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def connect(address: Path) -> Connection:
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(address))
    return Connection(link.detach())


if __name__ == "__main__":
    # Under its importable name, so that the requests that pytest pickles are instances of our own classes.
    from tests._worlds import worker

    worker.main(sys.argv[1], Path(sys.argv[2]))
