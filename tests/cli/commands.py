"""Runs the torchmn command in a subprocess, and ends all of its processes with the test.

Tests that call the command in this process import `main` and the tables of commands and starters from here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests._worlds.launch import LABEL, OPENMPI_PREFIX, ROOT, clean_environment, labelled
from tests._worlds.warm_start.servers import warm_environment
from torchmn.cli.commands.new import STARTERS as STARTERS
from torchmn.cli.commands.new import starters as starters
from torchmn.cli.launch import memory as memory
from torchmn.cli.main import COMMANDS as COMMANDS
from torchmn.cli.main import main as main

# Every way in which `torchmn run` starts ranks: its arguments, and its environment.
TRANSPORTS = {
    "mpich": (["--transport", "mpi"], {}),
    "openmpi": (["--transport", "mpi"], {"TORCHMN_MPIEXEC": str(OPENMPI_PREFIX / "bin" / "mpirun")}),
    "gloo": (["--transport", "gloo"], {}),
}

every_transport = pytest.mark.parametrize("transport", TRANSPORTS)

# A rank's number without importing anything: these scripts are about processes, not about communication.
RANK = """
import os, signal, sys, time
rank = int(next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK") if name in os.environ))
"""

# Longer than any test may last: a rank that sleeps so long has to be ended.
FOREVER = 1000
# Seconds until a command that should have ended counts as hanging, also on a machine that is busy.
PATIENCE = 100.0


@dataclass(frozen=True)
class Result:
    """How a command ended, and the processes that it left behind."""

    status: int
    out: str
    err: str
    survivors: list[str]


class Command:
    """A running torchmn command."""

    def __init__(
        self, arguments: list[str], directory: Path, env: dict[str, str], python: str, warm: bool = False, **streams
    ):
        self.directory, self.label = directory, uuid.uuid4().hex
        # TMPDIR: files that a killed launcher cannot remove are removed with the test's directory.
        surroundings = {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory)}
        if warm:
            surroundings |= warm_environment([str(ROOT)])
        # Files, not pipes: a process left behind would keep a pipe open, and us waiting for its end.
        with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [python, "-m", "torchmn.cli.main", *arguments],
                cwd=directory,
                env={**clean_environment(), **surroundings, **env, LABEL: self.label},
                start_new_session=True,
                # The test run itself may be in the background of a shell, where Ctrl-C is ignored, and so here.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
                **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **streams},
            )

    @property
    def out(self) -> str:
        return (self.directory / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.directory / "err").read_text(errors="replace")

    def until_printed(self, text: str, times: int, patience: float = PATIENCE) -> None:
        """Returns when `text` has been printed so often; fails the test when it is not."""
        deadline = time.monotonic() + patience
        while self.out.count(text) < times:
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"{text!r} was not printed {times} times:\n{self.out}\n{self.err}")
            time.sleep(0.02)

    def end(self, timeout: float = PATIENCE, last_breath: float = 2) -> Result:
        """The result, once the command has ended by itself; fails the test when it does not."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout} s:\n{self.out}\n{self.err}")
        deadline = time.monotonic() + last_breath
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.02)
        # More ranks than cores are no subject of these tests, and machines differ.
        err = re.sub(r"torchmn: \d+ ranks share \d+ cores?: .*\n", "", self.err)
        return Result(status, self.out, err, [" ".join(process.cmdline()) for process in left])

    def family(self) -> list[psutil.Process]:
        """Every living process that came from this command, found by the label that it inherited."""
        return labelled(self.label)

    def kill(self) -> None:
        for process in self.family():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()


@contextmanager
def started(
    *arguments: str, env: dict[str, str] | None = None, python: str = sys.executable, **options
) -> Iterator[Command]:
    """The command while it runs; killed with all that it started when the block is left.

    `options`: its streams, or `warm=True` where the test is about numbers (tests/_worlds/warm_start), not processes.
    """
    with tempfile.TemporaryDirectory(prefix="torchmn-cli-") as directory:
        command = Command(list(arguments), Path(directory), env or {}, python, **options)
        try:
            yield command
        finally:
            command.kill()


def torchmn(*arguments: str, timeout: float = PATIENCE, **options) -> Result:
    """The result of `torchmn` with these arguments."""
    with started(*arguments, **options) as command:
        return command.end(timeout)


def script(directory: Path, text: str, name: str = "script.py") -> str:
    """The path of a script in which `rank` is known."""
    path = directory / name
    path.write_text(RANK + textwrap.dedent(text))
    return str(path)


def on(transport: str) -> tuple[list[str], dict[str, str]]:
    """The arguments and environment for a transport; skips the test where its launcher is not installed."""
    arguments, env = TRANSPORTS[transport]
    if transport == "openmpi" and not os.path.exists(env["TORCHMN_MPIEXEC"]):
        pytest.skip(f"Open MPI is not at {OPENMPI_PREFIX}")
    return arguments, env


@contextmanager
def running(transport: str, size: int, *command: str, env: dict[str, str] | None = None) -> Iterator[Command]:
    """`torchmn run` of `command` on `size` ranks of `transport`, while it runs."""
    arguments, environment = on(transport)
    with started("run", "-n", str(size), *arguments, *command, env=environment | (env or {})) as running_command:
        yield running_command


def run(transport: str, size: int, *command: str, env: dict[str, str] | None = None) -> Result:
    """The result of `torchmn run` of `command` on `size` ranks of `transport`."""
    with running(transport, size, *command, env=env) as running_command:
        return running_command.end()
