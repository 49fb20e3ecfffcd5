"""Wrapper process of one rank: connects its output to the launcher's pipes, and reports its start and end.

    python -I -S rank_process.py DIRECTORY RANK_VARIABLE

`torchmn run` starts every rank through this file, by its path and with the standard library only, so that it starts
fast and is not affected by the rank's environment. DIRECTORY contains the rank's `command`, as JSON, and the
launcher's pipes: `events`, and `<rank>.out` and `<rank>.err` for the two output streams. They bypass mpiexec, which
would split lines, lose the status of a rank that was ended by a signal, and interpret a ":" among the script's
arguments. Thus both transports behave the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

ENDING = "ending"  # a file that the launcher creates in DIRECTORY before it signals all ranks to end
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, see prctl(2)
ONE_REQUEST = 1.0  # seconds; a batch system sends SIGTERM twice, and to every process: this counts as one request


def prctl(option: int, value: int) -> bool:
    """Calls prctl(2); returns whether it succeeded. False on systems without it."""
    try:
        return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Makes the kernel send `signum` to this process when its parent ends, even if the parent is killed."""
    if prctl(SET_DEATH_SIGNAL, signum) and os.getppid() != parent:
        os._exit(128 + signum)  # the parent ended between fork and prctl


def main() -> None:
    directory, rank_variable = sys.argv[1:]
    rank = os.environ[rank_variable]
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = rank  # for torch.distributed; all ranks are on this host
    end_with_parent(os.getppid())
    with open(f"{directory}/command", encoding="utf-8", errors="surrogateescape") as file:
        command = json.load(file)
    events = open_pipe(f"{directory}/events")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(open_pipe(f"{directory}/{rank}.out"), 1)
    os.dup2(open_pipe(f"{directory}/{rank}.err"), 2)
    status = run(command, lambda pid: os.write(events, f"start {rank} {pid}\n".encode()))
    # Reported before this process ends, at which mpiexec ends the other ranks.
    os.write(events, f"end {rank} {status}\n".encode())
    if os.path.exists(f"{directory}/{ENDING}"):
        exit_on_signal(status)
    os._exit(status)


def exit_on_signal(status: int) -> None:
    """Waits for a signal, then exits: if this process ended at once, mpiexec would end ranks that still clean up."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: os._exit(status))
    while True:
        signal.pause()


def open_pipe(path: str) -> int:
    # Without O_NONBLOCK, open would block forever if the launcher has ended.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(descriptor, True)
    return descriptor


def run(command: list[str], started: Callable[[int], object]) -> int:
    """Runs `command`; calls `started` with its process id, and returns its exit status, 128 + n after signal n."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            end_with_parent(parent)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would keep that
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    stop_signals: list[int] = []
    last: dict[int, float] = {}

    def forward(signum: int, frame: object) -> None:
        now = time.monotonic()
        if now - last.get(signum, -ONE_REQUEST) < ONE_REQUEST:
            return
        last[signum] = now
        if signum != signal.SIGUSR1:  # a rank may continue after SIGUSR1
            stop_signals.append(signum)
        with suppress(ProcessLookupError):  # it may just have ended
            os.kill(pid, signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, forward)
    started(pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if stop_signals:
        os._exit(128 + stop_signals[0])  # sent by mpiexec because another rank failed: not a failure of this one
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    main()
