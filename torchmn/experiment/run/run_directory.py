"""The directory of a run: what --out names, or the next free place under runs/."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchmn.errors import ExperimentError
from torchmn.experiment.file.document import Document, compose, document, read_text
from torchmn.experiment.vocabulary.load import dump, model_in, plain
from torchmn.experiment.vocabulary.schema import Experiment

EXPERIMENT, LOG, CHECKPOINTS, REPORT = "experiment.yaml", "log.jsonl", "checkpoints", "report.html"
PRETRAINING = "pretraining step"
MAY_CHANGE = ("epochs", "parallel", "metrics", "predictions", "keep", "imports")
"""What a run may go on with other values of."""


@dataclass(frozen=True)
class RunDirectory:
    """Where a run keeps its log, its checkpoints, its experiment and its report."""

    path: Path

    @property
    def log(self) -> Path:
        return self.path / LOG

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def report(self) -> Path:
        return self.path / REPORT

    @property
    def holds_a_run(self) -> bool:
        """Whether something would be lost: a run that ended before its first step is none."""
        return any(self.checkpoints.glob("*")) or (self.log.exists() and self.log.stat().st_size > 0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other run can write here; an ExperimentError if one does."""
        descriptor = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)  # type: ignore[arg-type]
            raise ExperimentError(
                f"--out {self.path}: another run is at work there. Wait for its end, or name another directory."
            ) from None
        except OSError as error:
            if descriptor is None:
                raise ExperimentError(f"--out {self.path}: can not be written to ({error.strerror})") from error
            # Some disks of clusters have no locks: there it is up to the user.
        try:
            yield
        finally:
            os.close(descriptor)

    def begin(self, experiment: Experiment) -> None:
        """Write down what this run is; an ExperimentError if there is a run already."""
        if self.holds_a_run:
            raise ExperimentError(
                f"--out {self.path}: there is a run already. Say --resume to go on with it, or name another directory."
            )
        self.record(experiment)

    def go_on(self, experiment: Experiment) -> None:
        """Check that this is the run to go on with; an ExperimentError if it is another experiment's."""
        if not (self.path / EXPERIMENT).is_file():
            raise ExperimentError(f"--resume: there is no run in {self.path}")
        before = self._recorded("--resume").values
        now = plain(experiment)
        for key in [key for key in now if key not in MAY_CHANGE]:
            other = difference(_plainer(before.get(key)), _plainer(now[key]), key)
            if other is not None:
                raise ExperimentError(
                    f"--resume: the run in {self.path} began with another {other}. Only {', '.join(MAY_CHANGE)} may "
                    "change; start anew with another --out."
                )

    def check_trained(self, experiment: Experiment) -> None:
        """An ExperimentError if another model than the experiment's was trained here: of the same shapes, maybe.

        The imports of the file that lies here are not run: it may be somebody else's, and nobody named it.
        """
        file = self.path / EXPERIMENT
        if not file.is_file():  # checkpoints that were taken elsewhere
            return
        recorded = self._recorded(f"--checkpoint {self.path}")
        try:
            model = model_in(recorded)
        except ExperimentError as error:
            imports = recorded.values.get("imports")
            unrun = (
                f"\nThe `imports: {imports}` of {file} are not run: only those of the file on the command line are. If "
                f"you trust it, name it there: torchmn evaluate {file} --checkpoint {self.path}"
            )
            raise ExperimentError(f"--checkpoint {self.path}: {error}{unrun if imports else ''}") from error
        trained, asked = (_layers_of(plain(each)) for each in (model, experiment.the_model()))
        other = difference(trained, asked, "model")
        if other is not None:
            raise ExperimentError(
                f"--checkpoint {self.path}: what was trained there had another {other}. The weights belong to "
                f"{file}: name that file, or change yours back."
            )

    def _recorded(self, flag: str) -> Document:
        """What the run wrote down about itself, as values alone; `flag` begins what is said if it is damaged."""
        file = self.path / EXPERIMENT
        try:
            found = document(EXPERIMENT, compose(EXPERIMENT, read_text(file)))
        except ExperimentError as error:
            raise ExperimentError(f"{flag}: {file} can not be read ({error})") from error
        if not isinstance(found.values, dict):
            raise ExperimentError(f"{flag}: {file} holds no experiment: was it cut off?")
        return found

    def cut_log(self, step: int, pretraining_step: int = 0) -> None:
        """Remove from the log what happened after these steps: it will happen again."""
        with suppress(FileNotFoundError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [
                line for line in lines if _step_of(line) <= step and _step_of(line, PRETRAINING) <= pretraining_step
            ]
            _replace(self.log, "".join(f"{line}\n" for line in kept))

    def record(self, experiment: Experiment) -> None:
        """Write down what this run is from now on."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _replace(self.path / EXPERIMENT, dump(experiment))
            self.report.unlink(missing_ok=True)  # of a run that goes on it would tell the half
        except OSError as error:
            raise ExperimentError(f"--out {self.path}: can not be written to ({error.strerror})") from error


def _replace(path: Path, text: str) -> None:
    """Write a file that is there whole or as it was before, also where we are killed in the middle."""
    other = path.with_name(f".{path.name}.new")
    other.write_text(text, encoding="utf-8")
    other.replace(path)


def choose(out: str | None, file: str, resume: bool) -> RunDirectory:
    """The directory of a run of `file`: `out`, or the newest (to go on) or next free one under runs/."""
    if out is not None:
        return RunDirectory(Path(os.path.abspath(Path(out).expanduser())))
    runs, stem = Path.cwd() / "runs", Path(file).stem
    pattern = re.compile(rf"{re.escape(stem)}(?:-(\d+))?")
    present = {path.name for path in runs.iterdir()} if runs.is_dir() else set()
    numbers = sorted(int(match[1] or 1) for name in present if (match := pattern.fullmatch(name)))
    if resume:
        if not numbers:
            raise ExperimentError(f"--resume: there is no run of {stem} in {runs}. Name its directory with --out.")
        number = numbers[-1]
    else:
        number = numbers[-1] + 1 if numbers else 1
    return RunDirectory(runs / (stem if number == 1 else f"{stem}-{number}"))


def run_of(checkpoint: str) -> RunDirectory:
    """The run that a user means by its directory, or by that of its checkpoints."""
    path = Path(os.path.abspath(Path(checkpoint).expanduser()))
    return RunDirectory(path.parent if path.name == CHECKPOINTS else path)


class Difference(NamedTuple):
    """Where two plain values are not the same, and what stands there in each."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before}, and now it is {self.now}"


def difference(before: Any, now: Any, key: str) -> Difference | None:
    """The first thing that is not the same in two plain values under `key`; None if all is."""
    if before == now:
        return None
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(before, dict) and isinstance(now, dict):
        inner = [(before.get(name), now.get(name), f"{key}.{name}") for name in {**before, **now}]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        inner = [(one, other, f"{key}.{place}") for place, (one, other) in enumerate(zip(before, now, strict=True))]
    found = next(filter(None, (difference(*values) for values in inner)), None)
    return found or Difference(key, _short(before), _short(now))


def _layers_of(model: dict[str, Any]) -> Any:
    """What a model computes: not what it is to learn."""
    return _plainer({name: value for name, value in model.items() if name not in ("cost", "target")})


def _step_of(line: str, counter: str = "step") -> int:
    try:
        values = json.loads(line)
        return int(values.get(counter, 0) if counter == PRETRAINING else values[counter])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return 1 << 62  # a line that was cut off, or that no run has written


def _plainer(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
