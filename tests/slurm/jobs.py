"""Commands and jobs of the cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests._worlds.launch import OPENMPI_PREFIX, clean_environment

BIN = Path(sys.executable).parent
OPENMPI = {"MPI4PY_LIBMPI": str(OPENMPI_PREFIX / "lib" / "libmpi.so.40")}
PATIENCE = 300.0
SUM = """
import torch, torchmn
comm = torchmn.create_communicator(timeout=60)
total = comm.allreduce(torch.tensor([comm.rank + 1.0])).item()
print("rank", comm.rank, "of", comm.size, "sum", total, flush=True)
"""


@dataclass(frozen=True)
class Result:
    """How a command ended, and all that it printed."""

    status: int
    output: str


@dataclass(frozen=True)
class Job:
    """A batch job."""

    id: str
    output: Path

    def field(self, name: str) -> str:
        """Returns a value of `scontrol show job`."""
        shown = run("scontrol", "show", "job", "--oneliner", self.id).output
        found = re.search(rf"\b{name}=(\S*)", shown)
        return found[1] if found else shown

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def signal(self, *options: str) -> None:
        assert run("scancel", *options, self.id).status == 0

    def wait(self, over: Callable[[], object], what: str) -> None:
        """Waits until `over()` is true."""
        deadline = time.monotonic() + PATIENCE
        while not over():
            assert time.monotonic() < deadline, f"no {what} after {PATIENCE:g} s:\n{self.field('.*')}\n{self.text()}"
            time.sleep(0.2)

    def ended(self) -> bool:
        return self.field("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")


def environment(**more: str) -> dict[str, str]:
    """Returns an environment with this Python's commands, without variables of launchers."""
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    return {**clean_environment(), **kept, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **more}


def run(*command: str, cwd: Path | None = None, **more: str) -> Result:
    """Runs a command on the host from which jobs are submitted."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
    )
    return Result(done.returncode, done.stdout.decode(errors="replace"))


def srun(kind: str, *command: str, nodes: int = 2, **more: str) -> Result:
    """Runs a command on two ranks with `srun --mpi=kind`."""
    return run("srun", f"--mpi={kind}", "-N", str(nodes), "-n", "2", *command, **more)


def sbatch(directory: Path, script: Path | str, *options: str, arguments: Sequence[str] = (), **more: str) -> Job:
    """Submits a batch script, which is a file or the lines after `#!/bin/sh`, to run in `directory`."""
    if isinstance(script, str):
        path = directory / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
    else:
        path = script
    result = run("sbatch", "--parsable", "--output=job-%j.out", *options, str(path), *arguments, cwd=directory, **more)
    assert result.status == 0, result.output
    number = result.output.strip().splitlines()[-1]
    return Job(number, directory / f"job-{number}.out")


def cancel_all() -> None:
    """Ends all jobs, and waits until the nodes are free."""
    run("scancel", "--signal=KILL", "--full", "--user=root")
    run("scancel", "--user=root")
    deadline = time.monotonic() + PATIENCE
    while run("squeue", "--noheader").output.strip():
        assert time.monotonic() < deadline, "jobs do not end"
        time.sleep(0.2)
