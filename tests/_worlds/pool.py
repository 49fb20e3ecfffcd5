"""Worker pools: the processes of a world, kept from test to test and replaced when a test breaks them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests._worlds.launch import Launch
from tests._worlds.marks import World
from tests._worlds.worker import STACK_SIGNAL, Hello, Outcome, Run

# Long: on a busy machine, importing torch on every rank takes a minute.
START_SECONDS = 180.0
# How long the other ranks may take once one has failed; they most likely wait for it.
GRACE_SECONDS = 3.0
# A rank that waits too long is ended by the library's watchdog, whose table is more detailed than our report.
RANK_TIMEOUT = "45"


class WorldFailed(Exception):
    """A test's body failed on some rank; the message has every rank's account."""


class Skipped(Exception):
    """The test's body skipped itself."""


class Pools:
    """The pools of a session, each started when a test first needs it and replaced when a test broke it."""

    # Idle ranks cost memory, not time; two, so that a test selected out of order does not end a warm pool.
    MOST = 2

    def __init__(self) -> None:
        self.running: dict[World, Pool] = {}
        self.broken: dict[World, WorldFailed] = {}

    def run(self, world: World, request: Run, timeout: float) -> None:
        """Runs a test's body on every rank of `world`; raises `WorldFailed`, `Skipped` or `NoLauncher`."""
        pool = self._pool(world)
        try:
            pool.run(request, timeout)
        except (WorldFailed, Skipped):
            raise
        except BaseException:  # interrupted: the ranks may still be in the test's body
            pool.alive = False
            raise
        finally:
            if not pool.alive:
                self.running.pop(world).stop()

    def stop(self) -> None:
        """Ends all ranks."""
        while self.running:
            self.running.popitem()[1].stop()

    def _pool(self, world: World) -> Pool:
        if world in self.broken:
            raise self.broken[world]
        if world not in self.running:
            while len(self.running) >= self.MOST:
                self.running.pop(next(iter(self.running))).stop()
            try:
                self.running[world] = Pool(world)
            except WorldFailed as failure:
                # It would fail in every further test, each after a long wait.
                self.broken[world] = failure
                raise
        return self.running[world]


class Pool:
    """The ranks of one world. After `run` has raised, `alive` is whether the ranks can serve another test."""

    def __init__(self, world: World):
        """Starts the ranks and waits for the greeting of each."""
        self.world = world
        self.alive = True
        self.channels: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        self.directory = Path(tempfile.mkdtemp(prefix="torchmn-world-"))
        self.output = open(self.directory / "output", "wb")  # noqa: SIM115  (closed by stop)
        self.hanging: list[int] = []
        self.launch: Launch | None = None
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self.directory / "socket"))
                listener.listen(world.size)
                self.launch = Launch(
                    world.transport,
                    world.size,
                    ["-m", "tests._worlds.worker", world.transport, str(self.directory)],
                    env={"TORCHMN_TIMEOUT": RANK_TIMEOUT, "PYTHONUNBUFFERED": "1"},
                    stdout=self.output,
                    stderr=self.output,
                )
                self._greet(listener)
        except BaseException:
            self.stop()
            raise

    def run(self, request: Run, timeout: float) -> None:
        """Runs a test's body on every rank; raises `WorldFailed` or `Skipped`."""
        begin = self._output_size()
        for channel in self.channels.values():
            with contextlib.suppress(ConnectionError):  # a rank that died is found when it is asked
                channel.send(request)
        outcomes = self._reports(timeout)
        statuses = {rank: outcome.status for rank, outcome in outcomes.items()}
        everyone = range(self.world.size)
        if all(statuses.get(rank) == "passed" for rank in everyone):
            outcomes = self._reports(timeout)
            statuses = {rank: outcome.status for rank, outcome in outcomes.items()}
        if all(statuses.get(rank) == "passed" for rank in everyone):
            return
        account = self._account(outcomes, timeout)
        if not all(statuses.get(rank) in ("failed", "skipped") for rank in everyone):
            # A rank that passed or hangs may wait for the others for ever. Besides, the last words of ranks
            # that died reach the file only when their launcher has gone.
            self.stop_processes()
        if all(statuses.get(rank) == "skipped" for rank in everyone):
            raise Skipped(outcomes[0].text)
        raise WorldFailed(account + self._output_since(begin))

    def stop_processes(self) -> None:
        """Ends the ranks at once."""
        self.alive = False
        for channel in self.channels.values():
            channel.close()
        if self.launch is not None:
            self.launch.kill()

    def stop(self) -> None:
        """Ends the ranks and drops their output."""
        self.stop_processes()
        self.output.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _greet(self, listener: socket.socket) -> None:
        assert self.launch is not None
        listener.settimeout(0.2)
        deadline = time.monotonic() + START_SECONDS
        waiting: list[Connection] = []
        while len(self.channels) < self.world.size:
            if time.monotonic() > deadline or self.launch.ended():
                ended = "ended" if self.launch.ended() else f"did not report within {START_SECONDS:.0f} s"
                raise WorldFailed(f"{self.world}: the ranks {ended} before any test{self._output_since(0)}")
            with contextlib.suppress(TimeoutError):
                link, _ = listener.accept()
                link.setblocking(True)
                waiting.append(Connection(link.detach()))
            for channel in wait(waiting, timeout=0):
                assert isinstance(channel, Connection)
                waiting.remove(channel)
                with contextlib.suppress(EOFError, ConnectionError):
                    hello: Hello = channel.recv()
                    self.channels[hello.rank] = channel
                    self.pids[hello.rank] = hello.pid

    def _reports(self, timeout: float) -> dict[int, Outcome]:
        """The next outcome of each rank that reports in time; a rank whose process died has none."""
        outcomes: dict[int, Outcome] = {}
        silent = dict(self.channels)
        deadline = time.monotonic() + timeout
        while silent and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(silent.values()), left)
            for rank in [rank for rank, channel in silent.items() if channel in ready]:
                channel = silent.pop(rank)
                try:
                    outcomes[rank] = channel.recv()
                    troubled = outcomes[rank].status != "passed"
                except (EOFError, ConnectionError):
                    troubled = True
                if troubled:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        self.hanging = sorted(silent)
        return outcomes

    def _account(self, outcomes: dict[int, Outcome], timeout: float) -> str:
        """Returns the report of each rank, the failed ranks first."""
        stacks = self._stacks(self.hanging)
        reports = {"failed": [], "died": [], "waiting": [], "passed": [], "skipped": []}
        for rank in range(self.world.size):
            name = f"rank {rank} of {self.world.size} ({self.world.transport})"
            if rank in outcomes:
                outcome = outcomes[rank]
                reports[outcome.status].append(f"{name} {outcome.status}\n{outcome.text}".rstrip())
            elif rank in self.hanging:
                reports["waiting"].append(f"{name} did not answer; its stack:\n{stacks[rank]}".rstrip())
            else:
                reports["died"].append(f"{name} ended in the middle of the test")
        if not reports["failed"] and not reports["died"]:
            reports["waiting"].insert(0, f"the test took longer than {timeout:g} s")
        return "\n\n".join(report for of_rank in reports.values() for report in of_rank)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where in the code each of `ranks` is now, all its threads."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], STACK_SIGNAL)
        return {rank: settled_stack(self.directory / f"stack-{rank}") for rank in ranks}

    def _output_size(self) -> int:
        return os.path.getsize(self.directory / "output")

    def _output_since(self, begin: int) -> str:
        with open(self.directory / "output", "rb") as output:
            output.seek(begin)
            text = output.read().decode(errors="replace").rstrip()
        return f"\n\nwhat the ranks wrote:\n{text}" if text else ""


def settled_stack(path: Path, patience: float = 2.0) -> str:
    """The stack in a file once its writer has paused (its end is not signalled), without our frames."""
    deadline = time.monotonic() + patience
    size = -1
    while time.monotonic() < deadline and (size <= 0 or path.stat().st_size != size):
        size = path.stat().st_size
        time.sleep(0.1)
    ours = ("tests/_worlds/worker.py", "<frozen runpy>")
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if not any(name in line for name in ours))
