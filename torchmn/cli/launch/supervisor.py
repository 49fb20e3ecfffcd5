"""Runs a job to its end. All ranks are ended when one fails or on a signal, and no process is left behind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torchmn.cli.launch.job import Job
from torchmn.cli.launch.process_tree import adopt_orphans, kill_descendants, send
from torchmn.cli.launch.rank_output import Screen
from torchmn.cli.launch.rank_pipes import RankPipes, rank_pipes
from torchmn.cli.launch.rank_process import ONE_REQUEST, end_with_parent
from torchmn.communicators.watchdog.observer_process import (
    StoppedProcesses,
    is_stopped,
    shared_memory_files,
    unlink_files,
    unlink_own_files,
)

# Seconds. Their sum stays below 5 after a failure, and below 4 after a signal.
FAILURE_SECONDS = 2.0  # a failure usually makes other ranks fail, whose errors may be more informative: print them
TERMINATION_SECONDS = 1.0
CLEANUP_SECONDS = 2.0
LAUNCHER_SECONDS = 1.0
REMAINING_SECONDS = 10.0  # ranks save a checkpoint together: when one has ended, the others should end soon
POLL_SECONDS = 0.05

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Interrupted(BaseException):
    """Raised by the handler of a signal that ends the job, so that it also interrupts a blocked write."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class Failure:
    """The first rank that failed, its exit status, and how it failed, if the status does not show it."""

    rank: int
    status: int
    how: str | None = None

    def __str__(self) -> str:
        if self.how is not None:
            return f"rank {self.rank} {self.how}"
        names = {128 + number: number.name for number in signal.Signals}
        how = f"was ended by {names[self.status]}" if self.status in names else "failed"
        return f"rank {self.rank} {how} (exit status {self.status})"


def supervise(
    job: Job, *, raw: bool = False, patience: float = CLEANUP_SECONDS, reported_status: int | None = None
) -> int:
    """Runs `job` and returns its exit status: 0, or that of the first failing rank (128 + n after signal n).

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 are forwarded to the ranks once. After `patience` + 1 s, or at another signal
    more than a second later, all ranks are killed.

    Args:
        job: the ranks to start.
        raw: without prefixes, and with rank 0 writing directly to the terminal.
        patience: seconds that ranks have to end after a signal.
        reported_status: exit status of ranks that have printed their error; no line is added for it.
    """
    screen = Screen()
    adopt_orphans()
    with job.reservation, rank_pipes(job.size, screen, raw=raw) as pipes:
        return Supervisor(job, pipes, screen, patience, reported_status).run()


class Supervisor:
    """The processes of a running job."""

    def __init__(self, job: Job, pipes: RankPipes, screen: Screen, patience: float, reported_status: int | None):
        self.job, self.pipes, self.screen = job, pipes, screen
        self.patience, self.reported_status = patience, reported_status
        self.processes: list[subprocess.Popen[bytes]] = []
        self.running: dict[int, int] = {}  # rank: process id
        self.started: list[int] = []  # process ids
        self.shared_memory: set[str] = set()  # files of MPICH that ranks have not removed yet
        self.succeeded = 0  # number of ranks
        self.failure: Failure | None = None
        self.ending: int | None = None  # the signal sent to every rank
        self.stopped = StoppedProcesses(_timeout())

    def run(self) -> int:
        """Starts the job, and returns its exit status when all of its processes have ended."""
        try:
            with ending_signals():
                return self._run()
        except Interrupted as second:  # kill without waiting any longer
            return 128 + second.signum
        finally:
            kill_descendants(process.pid for process in self.processes)
            for process in self.processes:
                process.wait()
            unlink_files(self.shared_memory)
            unlink_own_files(self.started)

    def _run(self) -> int:
        try:
            self._start()
            self._watch()
            if self.failure:
                if self.failure.status != self.reported_status:
                    stopped = "".join(f"; rank {rank} is stopped (SIGSTOP)" for rank in self._stopped_ranks())
                    text = f"torchmn: {self.failure}{stopped}{'; ending the others' if self.running else ''}"
                    self.screen.lines(self.screen.err, [text.encode()])
                self._wait(FAILURE_SECONDS, self._all_ended)
                self._end(signal.SIGTERM, TERMINATION_SECONDS)
            return self._status()
        except Interrupted as interrupted:
            self._end(interrupted.signum, self.patience)
            return 128 + interrupted.signum
        except BrokenPipeError:  # the reader of our output has exited, as in `| head`
            self._end(signal.SIGTERM, CLEANUP_SECONDS)
            return 128 + signal.SIGPIPE

    def _start(self) -> None:
        supervisor = os.getpid()
        for command, environment in self.job.commands(self.pipes.directory):
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self.pipes.launcher_output,
                stderr=self.pipes.launcher_output,
                start_new_session=True,  # the terminal's Ctrl-C reaches only the supervisor, which forwards it once
                preexec_fn=lambda: end_with_parent(supervisor, signal.SIGTERM),  # at SIGTERM mpiexec ends its ranks
            )
            self.processes.append(process)

    def _watch(self) -> None:
        """Waits until a rank has failed, or all have ended."""
        self._wait(math.inf, lambda: bool(self._failed()) or self._all_ended() or self._all_succeeded())
        if self._all_succeeded():
            self._wait(LAUNCHER_SECONDS, self._all_ended)
        self._handle_events(drain=True)
        self.failure = self._failed()
        self._find_shared_memory()

    def _find_shared_memory(self) -> None:
        self.shared_memory.update(*(shared_memory_files(pid) for pid in self.running.values()))

    def _wait(self, seconds: float, over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not over() and time.monotonic() < deadline:
            self._handle_events()

    def _handle_events(self, drain: bool = False) -> None:
        for event in self.pipes.drain() if drain else self.pipes.wait(POLL_SECONDS):
            if event.kind == "start":
                self.running[event.rank] = event.value
                self.started.append(event.value)
                if self.ending:
                    send(event.value, self.ending)
                continue
            self.running.pop(event.rank, None)
            if event.value == 0:
                self.succeeded += 1
            elif self.failure is None:
                self.failure = Failure(event.rank, event.value)

    def _all_succeeded(self) -> bool:
        return self.succeeded == self.job.size

    def _all_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def _failed(self) -> Failure | None:
        if self.failure is None:
            self.failure = self._lost()
        if self.failure is None and (rank := self.stopped.find(self.running)) is not None:
            self.failure = Failure(rank, 128 + signal.SIGSTOP, self.stopped.text)
        return self.failure

    def _stopped_ranks(self) -> list[int]:
        failed = self.failure.rank if self.failure else None
        return [rank for rank, pid in self.running.items() if rank != failed and is_stopped(pid)]

    def _lost(self) -> Failure | None:
        """Returns a rank whose wrapper was killed before it could report its end, if there is one process per rank."""
        if len(self.processes) == self.job.size:
            for rank, process in enumerate(self.processes):
                if status := process.poll():
                    return Failure(rank, shell_status(status))
        return None

    def _end(self, signum: int, patience: float) -> None:
        """Sends `signum` to every rank and, after at most `patience` seconds, terminates the processes around them."""
        self.ending = signum
        self._find_shared_memory()
        self.pipes.ignore_launcher()
        self.pipes.hold_ended_ranks()
        for pid in self.running.values():
            send(pid, signum)
        # If no rank has started yet, only the launcher is terminated.
        if self.running:
            signalled, deadline = len(self.running), time.monotonic() + patience
            self._wait(patience, lambda: self._all_ended() or len(self.running) < signalled)
            # A rank that waits for one that has ended, perhaps during start-up, cannot save any more.
            seconds = min(deadline - time.monotonic(), REMAINING_SECONDS)
            self._wait(seconds, lambda: self._all_ended() or not self.running)
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        self._wait(LAUNCHER_SECONDS, self._all_ended)

    def _status(self) -> int:
        if self.failure:
            return self.failure.status
        if self._all_succeeded():
            return 0
        # No rank reported a failure: MPI_Abort killed the wrappers too, or no rank was started.
        statuses = (process.poll() or 0 for process in self.processes)
        return shell_status(next((status for status in statuses if status), 0))


def _timeout(environ: Mapping[str, str] = os.environ) -> float:
    """Returns the seconds that a wait of a rank may last; the rank reports values that are wrong."""
    try:
        return float(environ.get("TORCHMN_TIMEOUT") or 300)
    except ValueError:
        return math.inf


def shell_status(status: int) -> int:
    """Returns the exit status as shells count it: 128 + n if signal n ended the process."""
    return status if status >= 0 else 128 - status


@contextmanager
def ending_signals() -> Iterator[None]:
    """Turns signals that would end this process into Interrupted; afterwards such signals are ignored.

    Further signals within ONE_REQUEST seconds have no effect. Signals that are ignored (nohup) stay ignored.
    """
    first: float | None = None

    def interrupt(signum: int, frame: object) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first < ONE_REQUEST:
            return
        first = first or time.monotonic()
        raise Interrupted(signum)

    handled = [signum for signum in ENDING_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    for signum in handled:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum in handled:
            signal.signal(signum, signal.SIG_IGN)
