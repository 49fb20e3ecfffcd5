"""A small experiment for the tests of commands on experiment files."""

from __future__ import annotations

import json
from pathlib import Path

TEXT = """\
dataset: {name: toy_images, side: 12, train: 48, test: 20}
model:
  layers:
    - conv: {maps: 3, kernel: 3, activation: relu}
    - max_pool: 2
    - dropout: 0.2
    - linear: 4
  cost: cross_entropy
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
epochs: 2
batch_size: 12
dtype: float64
metrics: [accuracy]
"""


def written(directory: Path, text: str = TEXT, name: str = "shapes.yaml") -> str:
    """The path of a file with this experiment."""
    path = directory / name
    path.write_text(text)
    return str(path)


def losses(out: Path) -> list[float]:
    """The loss of each step, from a run's log."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "epoch" not in line]
