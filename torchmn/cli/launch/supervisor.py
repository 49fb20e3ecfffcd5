"""Runs a job to its end: all ranks end when one fails or when we are told to, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchmn.cli.launch.job import Job
from torchmn.cli.launch.process_tree import adopt_orphans, kill_descendants, send
from torchmn.cli.launch.rank_output import Screen
from torchmn.cli.launch.rank_pipes import RankPipes, rank_pipes
from torchmn.cli.launch.rank_process import ONE_REQUEST, die_with

# Seconds. After a failure they stay below 5 in sum, after a signal below 4.
OTHERS_MAY_FAIL_TOO = 2.0  # most failures have an echo on the other ranks, which says more: let it be printed
RANKS_MAY_END_THEMSELVES = 1.0
RANKS_MAY_CLEAN_UP = 2.0
LAUNCHER_MAY_CLEAN_UP = 1.0
OTHERS_FOLLOW = 10.0  # ranks that were told to end save together: when one has ended, the others are nearly done
TICK = 0.05
FOREVER = float("inf")

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Interrupted(BaseException):
    """A signal told us to end. Raised by its handler, so that it breaks a blocked write to our output too."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class Failure:
    """The first rank that failed, and its exit status."""

    rank: int
    status: int

    def __str__(self) -> str:
        names = {128 + number: number.name for number in signal.Signals}
        how = f"was ended by {names[self.status]}" if self.status in names else "failed"
        return f"rank {self.rank} {how} (exit status {self.status})"


def supervise(
    job: Job, *, raw: bool = False, patience: float = RANKS_MAY_CLEAN_UP, explained: int | None = None
) -> int:
    """The exit status of `job` when it is over: 0, or its first failing rank's (128 + n after signal n).

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed to the ranks, once; after `patience` + 1 s, or a second signal that
    comes more than a second later, all are killed.
    `explained` is a status with which ranks have said themselves what was wrong: nothing is added then.
    """
    screen = Screen()
    adopt_orphans()
    with job.held, rank_pipes(job.size, screen, raw=raw) as pipes:
        return Supervisor(job, pipes, screen, patience, explained).run()


class Supervisor:
    """A job while it runs."""

    def __init__(self, job: Job, pipes: RankPipes, screen: Screen, patience: float, explained: int | None):
        self.job, self.pipes, self.screen, self.patience, self.explained = job, pipes, screen, patience, explained
        self.processes: list[subprocess.Popen[bytes]] = []
        self.running: dict[int, int] = {}  # rank: process id
        self.succeeded = 0  # ranks
        self.failure: Failure | None = None
        self.ending: int | None = None  # the signal that every rank gets

    def run(self) -> int:
        """Starts the job, and returns when nothing of it is left."""
        try:
            with ending_signals():
                return self._run()
        except Interrupted as again:  # a second signal: no more patience
            return 128 + again.signum
        finally:
            kill_descendants(process.pid for process in self.processes)
            for process in self.processes:
                process.wait()

    def _run(self) -> int:
        try:
            self._start()
            self._watch()
            if self.failure:
                if self.failure.status != self.explained:
                    self._say(f"{self.failure}{'; ending the others' if self.running else ''}")
                self._wait(OTHERS_MAY_FAIL_TOO, self._all_ended)
                self._end(signal.SIGTERM, RANKS_MAY_END_THEMSELVES)
            return self._status()
        except Interrupted as interrupted:
            self._end(interrupted.signum, self.patience)
            return 128 + interrupted.signum
        except BrokenPipeError:  # who read our output is gone, as after `| head`
            self._end(signal.SIGTERM, RANKS_MAY_CLEAN_UP)
            return 128 + signal.SIGPIPE

    def _start(self) -> None:
        ourselves = os.getpid()
        for command, environment in self.job.commands(self.pipes.directory):
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self.pipes.launcher_output,
                stderr=self.pipes.launcher_output,
                start_new_session=True,  # a terminal's Ctrl-C is for us, who pass it on once
                preexec_fn=lambda: die_with(ourselves, signal.SIGTERM),  # mpiexec ends its ranks then
            )
            self.processes.append(process)

    def _watch(self) -> None:
        """Returns when a rank has failed, or all have ended."""
        self._wait(FOREVER, lambda: bool(self.failure or self._lost()) or self._all_ended() or self._all_done())
        if self._all_done():
            self._wait(LAUNCHER_MAY_CLEAN_UP, self._all_ended)
        self._take_events(drain=True)
        self.failure = self.failure or self._lost()

    def _wait(self, seconds: float, over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not over() and time.monotonic() < deadline:
            self._take_events()

    def _take_events(self, drain: bool = False) -> None:
        for event in self.pipes.drain() if drain else self.pipes.wait(TICK):
            if event.kind == "start":
                self.running[event.rank] = event.value
                if self.ending:
                    send(event.value, self.ending)
                continue
            self.running.pop(event.rank, None)
            if event.value == 0:
                self.succeeded += 1
            elif self.failure is None:
                self.failure = Failure(event.rank, event.value)

    def _all_done(self) -> bool:
        return self.succeeded == self.job.size

    def _all_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def _lost(self) -> Failure | None:
        """A rank, started by us, whose wrapper was killed before it could report anything."""
        if len(self.processes) == self.job.size:
            for rank, process in enumerate(self.processes):
                if status := process.poll():
                    return Failure(rank, as_shells_count(status))
        return None

    def _end(self, signum: int, patience: float) -> None:
        """Ends every rank with `signum`, and what started them if that was not enough within `patience`."""
        self.ending = signum
        self.pipes.ignore_launcher()
        self.pipes.hold_ended_ranks()
        for pid in self.running.values():
            send(pid, signum)
        # Before its ranks have begun, a launcher is told itself.
        if self.running:
            asked, deadline = len(self.running), time.monotonic() + patience
            self._wait(patience, lambda: self._all_ended() or len(self.running) < asked)
            # Who lost a rank saves nothing any more: it may wait for that rank in the middle of its start.
            self._wait(min(deadline - time.monotonic(), OTHERS_FOLLOW), lambda: self._all_ended() or not self.running)
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        self._wait(LAUNCHER_MAY_CLEAN_UP, self._all_ended)

    def _status(self) -> int:
        if self.failure:
            return self.failure.status
        if self._all_done():
            return 0
        # No rank reported a failure: MPI_Abort took the reports with it, or no rank ever began.
        statuses = (process.poll() or 0 for process in self.processes)
        return as_shells_count(next((status for status in statuses if status), 0))

    def _say(self, text: str) -> None:
        self.screen.lines(self.screen.err, [f"torchmn: {text}".encode()])


def as_shells_count(status: int) -> int:
    """128 + n where a process was ended by signal n."""
    return status if status >= 0 else 128 - status


@contextmanager
def ending_signals() -> Iterator[None]:
    """Inside, a signal that would end this process raises Interrupted; afterwards such signals are ignored.

    Signals within ONE_REQUEST of the first are part of it. What we were started to ignore (nohup) stays ignored.
    """
    first: float | None = None

    def interrupt(signum: int, frame: object) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first < ONE_REQUEST:
            return
        first = first or time.monotonic()
        raise Interrupted(signum)

    heard = [signum for signum in ENDING_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    for signum in heard:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum in heard:
            signal.signal(signum, signal.SIG_IGN)
