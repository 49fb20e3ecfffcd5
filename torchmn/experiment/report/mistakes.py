"""Which classes are taken for which, and the surest mistakes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torchmn.datasets import Arrays
from torchmn.experiment.report.pictures import data_uri

MOST_CLASSES, MOST_MISTAKES = 30, 18


@dataclass(frozen=True)
class Mistake:
    """A sample that was taken for another class; `picture` is a data URI, or empty."""

    label: str
    taken_for: str
    picture: str


@dataclass
class Mistakes:
    """What templates/mistakes.html shows. `counts` is the confusion matrix, or None where classes are too many."""

    without_class: int
    """How many samples have outputs that are NaN."""
    counted: int
    labels: list[str]
    counts: list[list[int]] | None = None
    wrong: int = 0
    surest: list[Mistake] = field(default_factory=list)


def mistakes(data: Arrays, outputs: np.ndarray, targets: np.ndarray) -> Mistakes | None:
    """The mistakes of outputs (sample, class); None where the targets are no classes."""
    if targets.dtype.kind == "f" or outputs.ndim != 2 or outputs.shape[1] < 2:
        return None
    known = ~np.isnan(outputs).any(axis=1)
    labels = [data.classes[k] if k < len(data.classes) else str(k) for k in range(outputs.shape[1])]
    found = Mistakes(int((~known).sum()), int(known.sum()), labels)
    if found.counted:
        if not known.all():
            data, outputs, targets = data.only(np.flatnonzero(known)), outputs[known], targets[known]
        if len(labels) <= MOST_CLASSES:
            found.counts = confusion(outputs, targets).tolist()
        predicted = outputs.argmax(axis=1)
        wrong = np.flatnonzero(predicted != targets)
        lead = outputs[wrong, predicted[wrong]] - outputs[wrong, targets[wrong]]
        found.wrong = len(wrong)
        found.surest = [
            Mistake(labels[targets[row]], labels[predicted[row]], _picture(data, row))
            for row in wrong[np.argsort(-lead)][:MOST_MISTAKES]
        ]
    return found


def confusion(outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """How many samples of each class (row) were taken for each class (column)."""
    classes = outputs.shape[1]
    counts = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(counts, (targets, outputs.argmax(axis=1)), 1)
    return counts


def _picture(data: Arrays, row: int) -> str:
    """The sample at `row` as a data URI, or nothing where it is no image."""
    if len(data.shape) != 3 or data.shape[0] not in (1, 3):
        return ""
    return data_uri(data.take(np.array([row]))[0][0].numpy())
