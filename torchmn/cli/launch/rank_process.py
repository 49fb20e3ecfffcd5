"""The process around one rank: sends its output into the launcher's pipes, reports its end, outlives nobody.

    python -I -S rank_process.py DIRECTORY RANK_VARIABLE

`torchmn run` starts every rank through this file, by its path and with the standard library alone, so that it
takes no time and reads nothing of the rank's own environment. In DIRECTORY are the rank's `command`, as JSON, and
pipes made by the launcher: `events`, and `<rank>.out` and `<rank>.err` for the two streams. All of this goes past
mpiexec, which would tear lines, lose the status of a rank that a signal ended, and take a lone ":" among the
script's arguments for its own. So both transports behave alike.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress

ENDING = "ending"  # a file that the launcher makes in DIRECTORY before it signals all ranks to end
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, see prctl(2)
ONE_REQUEST = 1.0  # seconds: a batch system sends SIGTERM twice, and to every process; it is one request to end


def prctl(option: int, value: int) -> bool:
    """Whether the kernel took this setting of the process; False where there is no prctl (not Linux)."""
    try:
        return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Makes the kernel send us `signum` when our parent ends, even if it had no time to."""
    if prctl(SET_DEATH_SIGNAL, signum) and os.getppid() != parent:
        os._exit(128 + signum)  # it ended between our fork and our prctl


def main() -> None:
    directory, rank_variable = sys.argv[1:]
    rank = os.environ[rank_variable]
    die_with(os.getppid())
    with open(f"{directory}/command", encoding="utf-8", errors="surrogateescape") as file:
        command = json.load(file)
    events = open_pipe(f"{directory}/events")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(open_pipe(f"{directory}/{rank}.out"), 1)
    os.dup2(open_pipe(f"{directory}/{rank}.err"), 2)
    status = run(command, lambda pid: os.write(events, f"start {rank} {pid}\n".encode()))
    # Reported before we end: only then can mpiexec notice, and end ranks that did not fail.
    os.write(events, f"end {rank} {status}\n".encode())
    if os.path.exists(f"{directory}/{ENDING}"):
        wait_to_be_ended(status)
    os._exit(status)


def wait_to_be_ended(status: int) -> None:
    """Stays until the launcher ends this process: mpiexec would end the ranks that still clean up when we ended."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: os._exit(status))
    while True:
        signal.pause()


def open_pipe(path: str) -> int:
    # Without O_NONBLOCK a launcher that is gone would leave us waiting for it here.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(descriptor, True)
    return descriptor


def run(command: list[str], started) -> int:
    """The exit status of `command`, 128 + n after signal n. `started` is called with its process id."""
    ourselves = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with(ourselves)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # python ignores it, and exec would hand that on
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    told_to_stop = []
    last = {}

    def pass_on(signum, frame):
        now = time.monotonic()
        if now - last.get(signum, -ONE_REQUEST) < ONE_REQUEST:
            return
        last[signum] = now
        if signum != signal.SIGUSR1:  # a rank may go on after that
            told_to_stop.append(signum)
        with suppress(ProcessLookupError):  # it may just have ended
            os.kill(pid, signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, pass_on)
    started(pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if told_to_stop:
        os._exit(128 + told_to_stop[0])  # by mpiexec, because of another rank: nothing to report
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    main()
