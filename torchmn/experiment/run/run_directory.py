"""RunDirectory: log, checkpoints, experiment and report of a run, in --out or a new directory under runs/."""

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
from torchmn.experiment.vocabulary.load import dump, plain, read_model
from torchmn.experiment.vocabulary.schema import Experiment

EXPERIMENT, LOG, CHECKPOINTS, REPORT = "experiment.yaml", "log.jsonl", "checkpoints", "report.html"
PRETRAINING = "pretraining step"
MAY_CHANGE = ("epochs", "parallel", "metrics", "predictions", "keep", "imports")
"""Keys of an experiment that may change when a run is resumed."""


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run."""

    path: Path

    @property
    def experiment(self) -> Path:
        return self.path / EXPERIMENT

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
    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint, complete or not. Files that a killed run was writing are hidden."""
        return self.checkpoints.is_dir() and any(not name.startswith(".") for name in os.listdir(self.checkpoints))

    @property
    def has_run(self) -> bool:
        """Whether the directory has checkpoints or a report; a run that ended before its first checkpoint has none."""
        return self.has_checkpoints or self.report.is_file()

    @property
    def has_begun(self) -> bool:
        """Whether a run has recorded its experiment here, with or without a checkpoint."""
        return self.experiment.is_file()

    @property
    def has_log(self) -> bool:
        """Whether a run has logged its first step."""
        return self.log.is_file() and self.log.stat().st_size > 0

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Creates the directory and locks it against other runs; raises an ExperimentError if one has it locked."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise ExperimentError(f"--out {self.path}: cannot be written ({error.strerror})") from error
        try:
            # File systems without locks, as on some clusters, raise other errors: there nothing is checked.
            with suppress(OSError):
                _lock(descriptor, self.path)
            yield
        finally:
            os.close(descriptor)

    def begin(self, experiment: Experiment) -> None:
        """Records the experiment of a new run; raises an ExperimentError if the directory already has one.

        The log of a run that ended before its first checkpoint is kept as log.jsonl.old.
        """
        if self.has_run:
            raise ExperimentError(
                f"--out {self.path}: already contains a run. Use --resume to continue it, or choose another directory."
            )
        self.record(experiment)
        if self.has_log:
            self.log.replace(self.log.with_name(f"{LOG}.old"))

    def check_resumable(self, experiment: Experiment) -> None:
        """Raises an ExperimentError if there is no run, or one of an experiment that differs beyond MAY_CHANGE."""
        if not self.has_begun:
            raise ExperimentError(f"--resume: there is no run in {self.path}. Omit --resume to begin one.")
        before = self._recorded("--resume").values
        now = plain(experiment)
        for key in [key for key in now if key not in MAY_CHANGE]:
            changed = difference(_as_json(before.get(key)), _as_json(now[key]), key)
            if changed is not None:
                raise ExperimentError(
                    f"--resume: the run in {self.path} was started with another {changed}. Only "
                    f"{', '.join(MAY_CHANGE)} may change; use another --out for a new run."
                )

    def check_model(self, experiment: Experiment) -> None:
        """Raises an ExperimentError if the run trained another model, even one with the same shapes.

        The imports of the run's file are not executed, as the user has not named that file and may not trust it.
        """
        file = self.path / EXPERIMENT
        if not file.is_file():  # checkpoints copied from elsewhere
            return
        recorded = self._recorded(f"--checkpoint {self.path}")
        try:
            model = read_model(recorded)
        except ExperimentError as error:
            imports = recorded.values.get("imports")
            hint = (
                f"\nThe `imports: {imports}` of {file} are not executed, only those of the file on the command line. "
                f"If you trust it, run: torchmn evaluate {file} --checkpoint {self.path}"
            )
            raise ExperimentError(f"--checkpoint {self.path}: {error}{hint if imports else ''}") from error
        trained, requested = (_computation(plain(each)) for each in (model, experiment.model))
        changed = difference(trained, requested, "model")
        if changed is not None:
            raise ExperimentError(
                f"--checkpoint {self.path}: the trained model had another {changed}. The weights belong to "
                f"{file}: use that file, or undo the change."
            )

    def _recorded(self, flag: str) -> Document:
        """Returns the recorded experiment as plain values; errors begin with `flag`."""
        file = self.path / EXPERIMENT
        try:
            found = document(EXPERIMENT, compose(EXPERIMENT, read_text(file)))
        except ExperimentError as error:
            raise ExperimentError(f"{flag}: {file} cannot be read ({error})") from error
        if not isinstance(found.values, dict):
            raise ExperimentError(f"{flag}: {file} contains no experiment; it may be truncated")
        return found

    def truncate_log(self, step: int, pretraining_step: int = 0) -> None:
        """Removes lines of later steps from the log, because these steps will be repeated."""
        with suppress(FileNotFoundError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [
                line for line in lines if _step_of(line) <= step and _step_of(line, PRETRAINING) <= pretraining_step
            ]
            _replace(self.log, "".join(f"{line}\n" for line in kept))

    def record(self, experiment: Experiment) -> None:
        """Writes the experiment to the directory, and removes an old report."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _replace(self.path / EXPERIMENT, dump(experiment))
            self.report.unlink(missing_ok=True)
        except OSError as error:
            raise ExperimentError(f"--out {self.path}: cannot be written ({error.strerror})") from error


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ExperimentError(
            f"--out {path}: in use by another run. Wait until it has ended, or choose another directory."
        ) from None


def _replace(path: Path, text: str) -> None:
    """Writes a file atomically: if the process is killed, the old content remains."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def choose_directory(out: str | None, file: str, resume: bool = False) -> RunDirectory:
    """Returns the directory for a run of `file`.

    Args:
        out: the user's choice; if None, the next free directory under runs/, or to resume the newest.
        file: path of the experiment file.
        resume: whether a run is continued.
    """
    if out is not None:
        return RunDirectory(Path(os.path.abspath(os.path.expanduser(out))))
    runs, stem = Path.cwd() / "runs", Path(file).stem
    pattern = re.compile(rf"{re.escape(stem)}(?:-(\d+))?")
    present = {path.name for path in runs.iterdir()} if runs.is_dir() else set()
    numbers = sorted(int(match[1] or 1) for name in present if (match := pattern.fullmatch(name)))
    if resume:
        if not numbers:
            raise ExperimentError(f"--resume: there is no run of {stem} in {runs}. Give its directory with --out.")
        number = numbers[-1]
    else:
        number = numbers[-1] + 1 if numbers else 1
    return RunDirectory(runs / (stem if number == 1 else f"{stem}-{number}"))


def run_directory_of(checkpoint: str) -> RunDirectory:
    """Returns the run whose directory, or directory of checkpoints, is given."""
    path = Path(os.path.abspath(os.path.expanduser(checkpoint)))
    return RunDirectory(path.parent if path.name == CHECKPOINTS else path)


class Difference(NamedTuple):
    """The key at which two plain values differ, and its value in each."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before}, now {self.now}"


def difference(before: Any, now: Any, key: str) -> Difference | None:
    """Returns the first difference of two plain values, whose key is `key`; None if they are equal."""
    if before == now:
        return None
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(before, dict) and isinstance(now, dict):
        inner = [(before.get(name), now.get(name), f"{key}.{name}") for name in {**before, **now}]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        inner = [(old, new, f"{key}.{index}") for index, (old, new) in enumerate(zip(before, now, strict=True))]
    found = next(filter(None, (difference(*values) for values in inner)), None)
    return found or Difference(key, _short(before), _short(now))


def _computation(model: dict[str, Any]) -> Any:
    """Returns the options of a model that determine its outputs, without cost, target and initial weights."""
    return _as_json({name: value for name, value in model.items() if name not in ("cost", "target", "weights")})


def _step_of(line: str, counter: str = "step") -> int:
    try:
        values = json.loads(line)
        return int(values.get(counter, 0) if counter == PRETRAINING else values[counter])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return 1 << 62  # a truncated or foreign line


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def commit_of(directory: Path) -> str:
    """Returns the commit that is checked out in the git repository around `directory`; "" if there is none.

    It is read from files: ranks of an MPI job must not fork.
    """
    try:
        folder = next((parent / ".git" for parent in _and_parents(directory) if (parent / ".git").exists()), None)
        return "" if folder is None else _commit(folder)
    except (OSError, UnicodeDecodeError):
        return ""


def _and_parents(directory: Path) -> list[Path]:
    here = directory.resolve()
    return [here, *here.parents]


def _commit(folder: Path) -> str:
    if folder.is_file():  # of a worktree or submodule: "gitdir: path"
        folder = folder.parent / folder.read_text(encoding="utf-8").partition(":")[2].strip()
    head = (folder / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head
    name, common = head.partition(":")[2].strip(), folder
    if (folder / "commondir").is_file():  # the repository of a worktree
        common = folder / (folder / "commondir").read_text(encoding="utf-8").strip()
    for place in (folder, common):
        if (place / name).is_file():
            return (place / name).read_text(encoding="utf-8").strip()
    packed = common / "packed-refs"
    lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")
