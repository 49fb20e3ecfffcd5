"""What a report shows of the history of a run: the best epoch, charts of losses and metrics, and a table of epochs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

from torchmn.experiment.report.charts import Chart, Curve, Lines, line_charts
from torchmn.experiment.run.trainer import GRADIENT_NORM, LEARNING_RATE

Row = Mapping[str, float]
SPLITS = ("validation", "test", "train")
MOST_CELLS = 800
"""Of the table of epochs: of a longer one, some rows are omitted."""


@dataclass(frozen=True)
class BestEpoch:
    """The epoch with the lowest loss: of the validation samples, or without these of the test or training samples."""

    epoch: int
    name: str
    loss: float


def best_epoch(history: Sequence[Row]) -> BestEpoch | None:
    """Returns the best epoch; None if no epoch has a finite loss."""
    for name in (*(f"{split} loss" for split in SPLITS), "loss"):
        losses = [(row[name], int(row["epoch"])) for row in history if isfinite(row.get(name, nan))]
        if losses:
            loss, epoch = min(losses)
            return BestEpoch(epoch, name, loss)
    return None


def is_metric(name: str) -> bool:
    """Returns whether a column has losses or metrics."""
    return name != "epoch" and not name.startswith((LEARNING_RATE, GRADIENT_NORM))


def measure_of(name: str) -> str:
    """Returns the column's name without the split: "accuracy" for "test accuracy"."""
    split, _, measure = name.partition(" ")
    return measure if split in SPLITS and measure else name


def columns(history: Sequence[Row]) -> list[str]:
    """Returns the names in all epochs, as metrics may change when a run is resumed."""
    return list(dict.fromkeys(name for row in history for name in row))


def shown_rows(history: Sequence[Row]) -> list[Row]:
    """Returns the epochs for the table: all, or evenly spaced ones with the last."""
    step = -(-len(history) * len(columns(history)) // MOST_CELLS) if history else 1
    return [row for number, row in enumerate(history, start=1) if number % step == 0 or number == len(history)]


def charts(log: Path, history: Sequence[Row], is_percent: Callable[[str], bool]) -> list[Chart]:
    """Returns the charts of a run.

    Args:
        log: the file with the loss of each step.
        history: of each epoch.
        is_percent: whether a measure is a fraction, shown in percent.
    """
    steps = [line for line in _lines(log) if "loss" in line and "epoch" not in line]
    # JSON has no NaN or infinity: the log has them as strings.
    losses = Curve("loss of each step", [step["step"] for step in steps], [float(step["loss"]) for step in steps])
    found = [Lines("loss of each step", "step", [losses])]
    epochs = [row["epoch"] for row in history]
    groups: dict[str, list[str]] = {}
    for name in columns(history)[1:]:
        groups.setdefault(LEARNING_RATE if name.startswith(LEARNING_RATE) else measure_of(name), []).append(name)
    for title, names in groups.items():
        curves = [Curve(n, epochs, [row.get(n, nan) for row in history], k) for k, n in enumerate(names)]
        found.append(Lines(title, "epoch", curves, is_percent(title)))
    return line_charts(found)


def _lines(log: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, RecursionError):
        return []
    return [line for line in lines if isinstance(line, dict)]
