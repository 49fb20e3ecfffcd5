"""Confusion matrix of a classifier, and its most confident wrong predictions with their images."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass, field

import numpy as np

from torchmn.datasets import Arrays


def png(pixels: np.ndarray) -> bytes:
    """Returns a PNG file of pixels of shape (height, width) or (height, width, 3)."""
    height, width = pixels.shape[:2]
    colour = 0 if pixels.ndim == 2 else 2
    rows = np.ascontiguousarray(pixels, dtype=np.uint8).reshape(height, -1)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    body = b"".join(struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def data_uri(image: np.ndarray) -> str:
    """Returns a PNG as a data URI of an image (channel, height, width) of any range: RGB if it has 3 channels."""
    low, high = float(image.min()), float(image.max())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scaled = ((image - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    pixels = scaled.transpose(1, 2, 0) if len(scaled) == 3 else scaled[0]
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


MOST_CLASSES, MOST_EXAMPLES = 30, 12
LARGEST_SIDE = 36
"""Pixels of the pictures of examples; of larger images, means of blocks of pixels are shown."""


@dataclass(frozen=True)
class WrongPrediction:
    """A misclassified sample; `image` is a data URI, or empty."""

    label: str
    predicted: str
    image: str


@dataclass
class Confusion:
    """The values that templates/confusion.html shows."""

    nan_samples: int
    """Number of samples with NaN among their outputs, which are not counted."""
    counted: int
    labels: list[str]
    matrix: list[list[int]] | None = None
    """None if there are more than MOST_CLASSES classes."""
    wrong: int = 0
    examples: list[WrongPrediction] = field(default_factory=list)
    """The wrong predictions with the largest margin."""


def confusion_of(data: Arrays, outputs: np.ndarray, targets: np.ndarray) -> Confusion | None:
    """Returns the confusion of a classifier, or None if the targets are not classes.

    Args:
        data: the samples.
        outputs: (sample, class).
        targets: (sample,), the labels.
    """
    if targets.dtype.kind == "f" or outputs.ndim != 2 or outputs.shape[1] < 2:
        return None
    finite = ~np.isnan(outputs).any(axis=1)
    labels = [data.classes[k] if k < len(data.classes) else str(k) for k in range(outputs.shape[1])]
    found = Confusion(int((~finite).sum()), int(finite.sum()), labels)
    if found.counted:
        if not finite.all():
            data, outputs, targets = data.only(np.flatnonzero(finite)), outputs[finite], targets[finite]
        if len(labels) <= MOST_CLASSES:
            found.matrix = confusion_matrix(outputs, targets).tolist()
        predicted = outputs.argmax(axis=1)
        wrong = np.flatnonzero(predicted != targets)
        margin = outputs[wrong, predicted[wrong]] - outputs[wrong, targets[wrong]]
        found.wrong = len(wrong)
        found.examples = [
            WrongPrediction(labels[targets[row]], labels[predicted[row]], _image(data, row))
            for row in wrong[np.argsort(-margin)][:MOST_EXAMPLES]
        ]
    return found


def confusion_matrix(outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns the number of samples of each class (row) that were predicted as each class (column)."""
    classes = outputs.shape[1]
    counts = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(counts, (targets, outputs.argmax(axis=1)), 1)
    return counts


def _image(data: Arrays, row: int) -> str:
    """Returns the sample at `row` as a data URI, or "" if it is not an image."""
    if len(data.shape) != 3 or data.shape[0] not in (1, 3):
        return ""
    return data_uri(_shrunk(data.take(np.array([row]))[0][0].numpy()))


def _shrunk(image: np.ndarray) -> np.ndarray:
    """Returns an image (channel, height, width) with sides of at most LARGEST_SIDE pixels."""
    block = -(-max(image.shape[1:]) // LARGEST_SIDE)
    if block == 1:
        return image
    height, width = (max(extent // block, 1) for extent in image.shape[1:])
    whole = image[:, : height * block, : width * block]
    rows, columns = whole.shape[1] // height, whole.shape[2] // width  # a side may be shorter than a block
    return whole.reshape(len(image), height, rows, width, columns).mean(axis=(2, 4))
