"""`Logger`: progress bar, table of metrics and JSON lines of a training, written by rank 0 only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError

LEAST_WIDTH = 8
"""Columns of a number in the table, as later ones may be longer than the first."""
NARROW = {False: 7, True: 5}
"""The same in a narrow terminal, of integers (True) and others."""
GAP, INDENT = "  ", "    "
BAR_WIDTH = 72
"""Columns of the narrowest terminal with a bar and times; in others there is only the number of steps."""


class Logger:
    """A progress bar, a table with a row per epoch and a file of JSON lines, on rank 0; does nothing on other ranks.

    Example::

        with Logger(comm, steps=epochs * len(loader), json="log.jsonl", formats={"accuracy": ".1%"}) as log:
            for epoch in range(epochs):
                for batch in loader:
                    ...
                    log.step(loss=loss)
                log.epoch(epoch=epoch, loss=mean_loss, accuracy=accuracy)

    It does not communicate: all ranks may call its methods, or rank 0 alone. The values shown are those of rank 0;
    combine the values of all ranks before, for example with `create_multi_node_evaluator`.

    Args:
        comm: its rank 0 writes; None if there is one process.
        steps: number of steps, for the bar; None if unknown.
        json: the file to write: a line for each `epoch`, and for every `json_steps`-th `step` with values.
        json_steps: 0 writes no steps.
        append: continue an existing file; otherwise it is overwritten.
        formats: format specifications by name, such as `{"accuracy": ".1%"}`; other floats have six digits.
        file_only: names of values that `epoch` writes to the file and not to the table.
        line_seconds: if the output is not a terminal, a progress line is printed at this interval instead of a bar.
        console: where to print; by default the standard output.

    Raises:
        ArgumentError: on rank 0, if the file cannot be written.
    """

    def __init__(
        self,
        comm: Communicator | None = None,
        steps: int | None = None,
        *,
        json: str | Path | None = None,
        json_steps: int = 0,
        append: bool = False,
        formats: Mapping[str, str] | None = None,
        file_only: Iterable[str] = (),
        line_seconds: float = 60.0,
        console: Console | None = None,
    ):
        if comm is not None and not isinstance(comm, Communicator):
            raise ArgumentError(f"Logger: expected comm to be a communicator or None, got {describe(comm)}")
        self.enabled = comm is None or comm.rank == 0
        self.steps, self.json_steps, self.line_seconds = steps, json_steps, line_seconds
        self._console = console or Console(highlight=False)
        self._table = _MetricTable(dict(formats or {}), self._console.width)
        self._file_only = frozenset(file_only)
        self._step = 0
        self._start = self._last_line = monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._file: IO[str] | None = None
        if json is not None and self.enabled:
            self._file = _open(json, append, f"rank 0 of {comm.size}: " if comm else "")

    def step(self, **values: Any) -> None:
        """Counts one step, and shows its values beside the bar."""
        if not self.enabled:
            return
        self._step += 1
        if self.json_steps and values and self._step % self.json_steps == 0:
            self._write({"step": self._step, **values})
        if self._console.is_terminal:
            self._advance(values)
        elif monotonic() - self._last_line >= self.line_seconds:
            self._last_line = monotonic()
            rate = self._step / max(self._last_line - self._start, 1e-9)
            of = f" of {self.steps}" if self.steps else ""
            self.print("  ".join([f"step {self._step}{of}", f"{rate:.3g} steps/s", *self._table.pairs(values)]))

    def epoch(self, **values: Any) -> None:
        """Adds a row to the table, and a line to the JSON file; names are columns."""
        if not self.enabled:
            return
        for line in self._table.lines({name: x for name, x in values.items() if name not in self._file_only}):
            self.print(line)
        self._write({"step": self._step, "elapsed": monotonic() - self._start, **values})

    def print(self, text: str = "") -> None:
        """Prints a line above the bar."""
        if self.enabled:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def close(self) -> None:
        """Removes the bar and closes the file; may be called twice."""
        bar, self._bar = self._bar, None
        file, self._file = self._file, None
        try:
            if bar is not None:
                bar.stop()
        finally:
            if file is not None:
                file.close()

    def __enter__(self) -> Logger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self, values: Mapping[str, Any]) -> None:
        if self._bar is None:
            values_column = TextColumn("{task.fields[values]}", markup=False)
            columns = (MofNCompleteColumn(), values_column)
            if self._console.width >= BAR_WIDTH:
                bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
                columns = (*bar, TimeElapsedColumn(), TimeRemainingColumn(), values_column)
            # Transient, so that only the table remains on the screen.
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("steps", total=self.steps, completed=self._step - 1, values="")
            self._bar.start()
        if values:
            shown = {name: value for name, value in values.items() if name != "step"}  # the bar has it
            self._bar.update(self._task, values="  ".join(self._table.pairs(shown)))
        self._bar.advance(self._task)

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            # Flushed, so that a run that is killed leaves complete lines.
            self._file.write(json.dumps({name: _for_json(value) for name, value in values.items()}) + "\n")
            self._file.flush()


class _MetricTable:
    """Formats rows, one at a time, aligned under a header.

    If the columns are wider than `width`, their names are broken into one word per line; if that is not enough, a row
    takes several lines.
    """

    def __init__(self, formats: dict[str, str], width: int):
        self.formats, self.width = formats, width
        self.columns: dict[str, list[str]] = {}
        """The lines of the name of each column."""
        self.widths: dict[str, int] = {}

    def lines(self, values: Mapping[str, Any]) -> list[str]:
        """Returns the row, after a header if there is none yet or the columns have changed."""
        cells = {name: self.text(name, value) for name, value in values.items()}
        lines = []
        if list(self.widths) != list(cells):
            lines = [""] if self.widths else []
            self.widths = {}
            self._choose_widths(cells)
            lines += self._header()
        return [*lines, *self._row(cells)]

    def pairs(self, values: Mapping[str, Any]) -> list[str]:
        return [f"{name} {self.text(name, value)}" for name, value in values.items()]

    def text(self, name: str, value: Any) -> str:
        value = _number(value)
        if name in self.formats and isinstance(value, int | float):  # may be None
            return format(value, self.formats[name])
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    def _choose_widths(self, cells: Mapping[str, str]) -> None:
        for is_narrow in (False, True):
            self.columns = {name: (name.split() if is_narrow else []) or [name] for name in cells}
            for name, cell in cells.items():
                least = NARROW[cell.isdecimal()] if is_narrow else LEAST_WIDTH
                self.widths[name] = max(least, len(cell), *map(len, self.columns[name]))
            if len(self._lines()) == 1:
                return

    def _header(self) -> list[str]:
        height = max(map(len, self.columns.values()), default=0)
        padded = {name: [""] * (height - len(words)) + words for name, words in self.columns.items()}
        lines = [self._row({name: words[line] for name, words in padded.items()}) for line in range(height)]
        return [line for of_group in zip(*lines, strict=True) for line in of_group if line.strip()]

    def _row(self, cells: Mapping[str, str]) -> list[str]:
        return [
            ((INDENT if number else "") + GAP.join(f"{cells[name]:>{self.widths[name]}}" for name in names)).rstrip()
            for number, names in enumerate(self._lines())
        ]

    def _lines(self) -> list[list[str]]:
        """Returns the names of the columns in each line of a row."""
        lines: list[list[str]] = [[]]
        end = 0
        for name, width in self.widths.items():
            if lines[-1] and end + width > self.width:
                lines.append([])
                end = len(INDENT)
            lines[-1].append(name)
            end += width + len(GAP)
        return lines


def _open(path: str | Path, append: bool, where: str) -> IO[str]:
    # Without agreement between ranks, because a Logger may be created on rank 0 alone.
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a" if append else "w", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"{where}Logger: expected json to name a file that rank 0 can write, got {str(path)!r} ({error.strerror}: "
            f"{error.filename!r}). Name a file in a writable directory, or omit json"
        ) from None


def _number(value: Any) -> Any:
    """Returns a tensor or NumPy value of one element as a number; other values unchanged."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.item() if math.prod(value.shape) == 1 else value
    return value


def _for_json(value: Any) -> Any:
    """Returns a value that is valid JSON: nan and infinities become strings."""
    value = _number(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Tensor | np.ndarray):
        return _for_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): _for_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
