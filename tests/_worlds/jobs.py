"""Fresh jobs, for tests in which ranks die: of aborts, of the watchdog, of launching."""

from __future__ import annotations

import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests._worlds.hosts import Hosts
from tests._worlds.launch import Launch, NoLauncher, launcher

# How long the ranks may still run after their launcher ended before they count as left behind.
LAST_BREATH = 2.0


@dataclass(frozen=True)
class JobResult:
    """How a job went: whether it was stopped at its time-out, and which processes it left behind."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    survivors: tuple[str, ...]

    @property
    def output(self) -> str:
        """Both streams: some launchers merge them."""
        return self.stdout + self.stderr


def without_package(name: str) -> str:
    """The beginning of a script in which a package of the library cannot be imported, as if it were taken away."""
    return f"from tests.taken_away import take_away; take_away({name!r})\n"


def run_job(
    script: str | Path,
    n: int,
    transport: str = "mpi",
    *,
    args: Sequence[str] = (),
    env: dict[str, str] | None = None,
    timeout: float = 60.0,
    hosts: Hosts | None = None,
) -> JobResult:
    """The result of `script` (its text, or the Path of a file) on `n` ranks of a new job.

    `transport`: mpi, openmpi, gloo (the environment torchrun gives), or solo. Nothing of the job outlives
    this call: at the time-out every process is killed, and what a finished job left behind is reported and
    killed too. Where the transport's launcher is not installed, the test is skipped. `hosts`: where the ranks
    run, if not here.
    """
    try:
        launcher(transport, n)
    except NoLauncher as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(prefix="torchmn-job-") as directory:
        path = script if isinstance(script, Path) else Path(directory) / "script.py"
        if isinstance(script, str):
            path.write_text(textwrap.dedent(script))
        # Files, not pipes: a process that outlives its launcher would hold a pipe open and us with it.
        out, err = Path(directory) / "stdout", Path(directory) / "stderr"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            begin = time.monotonic()
            launch = Launch(transport, n, [str(path), *args], env=env, stdout=stdout, stderr=stderr, hosts=hosts)
            try:
                in_time = launch.wait(timeout)
                seconds = time.monotonic() - begin
                left = tuple(str(process) for process in launch.remain(LAST_BREATH)) if in_time else ()
            finally:
                launch.kill()
        return JobResult(
            returncode=launch.returncode(),
            stdout=out.read_text(errors="replace"),
            stderr=err.read_text(errors="replace"),
            seconds=seconds,
            timed_out=not in_time,
            survivors=left,
        )
