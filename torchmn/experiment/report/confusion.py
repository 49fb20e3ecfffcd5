"""Which classes are taken for which, and the surest mistakes."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass, field

import numpy as np

from torchmn.datasets import Arrays


def png(pixels: np.ndarray) -> bytes:
    """A PNG of bytes (height, width) or (height, width, 3)."""
    height, width = pixels.shape[:2]
    colour = 0 if pixels.ndim == 2 else 2
    rows = np.ascontiguousarray(pixels, dtype=np.uint8).reshape(height, -1)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    body = b"".join(struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def data_uri(image: np.ndarray) -> str:
    """A picture of an image (maps, height, width) with values of any range: grey, or colours where it has 3 maps."""
    low, high = float(image.min()), float(image.max())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scaled = ((image - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    pixels = scaled.transpose(1, 2, 0) if len(scaled) == 3 else scaled[0]
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


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
