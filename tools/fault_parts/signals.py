"""Trainings that get SIGTERM twice at random times, and are resumed: `run`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM
from typing import IO, NamedTuple

from tests._worlds.launch import LABEL, clean_environment, labelled

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 180.0
"""After which a command counts as hanging."""
LATEST = 3.0
"""Seconds after the first step until the first signal, at most."""
APART = 1.5
"""Seconds between the signals, at most: within a second they count as one request."""
STEPS = 4
"""Of each epoch."""
EXPERIMENT = """\
dataset: {name: toy_images, side: 12, train: 48, test: 20}
model:
  layers:
    - conv: {maps: 3, kernel: 3, activation: relu}
    - linear: 4
  cost: cross_entropy
optimizer: {name: sgd, lr: 0.01, momentum: 0.9}
epochs: 100000
batch_size: 12
dtype: float64
"""


class Result(NamedTuple):
    """How a training ended and was resumed.

    Attributes:
        number, transport, to_all, apart: of the training; `to_all`: every process got the signals, else the command.
        hangs: a command was still running after `SECONDS`.
        status, resumed_status: of the training, and of the one that resumed it.
        resumed: the line about the step from which it was resumed, or "".
        losses: of all steps, in the end.
    """

    number: int
    transport: str
    to_all: bool
    apart: float
    hangs: bool
    status: int
    resumed_status: int
    resumed: str
    losses: list[float]
    output: str

    def is_usable(self, uninterrupted: list[float]) -> bool:
        """Returns whether a checkpoint was resumed, and the losses are those of an uninterrupted training."""
        pairs = zip(self.losses, uninterrupted, strict=False)
        same = bool(self.losses) and all(abs(loss - expected) <= 1e-9 * expected for loss, expected in pairs)
        return self.resumed_status == 0 and bool(self.resumed) and len(self.losses) % STEPS == 0 and same


def run(number: int) -> Result:
    """Returns the result of one training: half of them over MPI, and half of the signals to all processes."""
    generator = random.Random(number)
    transport, to_all = ("mpi", "gloo")[number % 2], number // 2 % 2 == 1
    later, apart = generator.uniform(0, LATEST), generator.uniform(0, APART)
    with tempfile.TemporaryDirectory(prefix="torchmn-faults-") as name:
        directory, label = Path(name), uuid.uuid4().hex
        with (directory / "output").open("wb") as output:
            process = train(directory, output, "-n", "2", "--transport", transport, label=label)
            deadline = time.monotonic() + SECONDS
            while not losses(directory) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(later)
            for pause in (apart, 0):
                for each in labelled(label) if to_all else [process]:
                    with suppress(Exception):  # it has ended
                        each.send_signal(SIGTERM)
                time.sleep(pause)
            hangs = has_hung(process)
            epochs = len(losses(directory)) // STEPS + 1
            again = train(directory, output, "--resume", "--epochs", str(epochs), label=label)
            hangs = has_hung(again) or hangs
            for left in labelled(label):
                with suppress(Exception):
                    left.kill()
        text = (directory / "output").read_text(errors="replace")
        resumed = next((line for line in text.splitlines() if line.startswith("resumed after step")), "")
        statuses = process.wait(), again.wait()
        return Result(number, transport, to_all, apart, hangs, *statuses, resumed, losses(directory), text)


def uninterrupted(steps: int) -> list[float]:
    """Returns the losses of a training on one rank that is not stopped."""
    with tempfile.TemporaryDirectory(prefix="torchmn-faults-") as name, open("/dev/null", "wb") as output:
        train(Path(name), output, "--epochs", str(steps // STEPS + 1)).wait()
        return losses(Path(name))


def train(directory: Path, output: IO[bytes], *options: str, label: str = "") -> subprocess.Popen[bytes]:
    """Starts a training in `directory`."""
    (directory / "experiment.yaml").write_text(EXPERIMENT)
    return subprocess.Popen(
        [sys.executable, "-m", "torchmn.cli.main", "train", "experiment.yaml", "--out", "run", *options],
        env=clean_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), LABEL: label},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=directory,
        start_new_session=True,
    )


def losses(directory: Path) -> list[float]:
    """Returns the loss of each step, from the log of the run in `directory`."""
    with suppress(OSError):
        lines = (directory / "run" / "log.jsonl").read_text().splitlines()
        with suppress(ValueError):  # the last line is being written
            return [entry["loss"] for entry in map(json.loads, lines) if "epoch" not in entry]
    return []


def has_hung(process: subprocess.Popen[bytes]) -> bool:
    """Returns whether a process does not end within `SECONDS`; it is killed then."""
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return True
    return False
