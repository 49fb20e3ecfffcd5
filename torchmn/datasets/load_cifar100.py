"""`cifar100`: colour photographs of 32 x 32 pixels in a hundred classes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from torchmn.datasets import cache
from torchmn.datasets.arrays import Arrays, ImageSet
from torchmn.datasets.arrays import labels as as_labels
from torchmn.datasets.formats import cifar_files
from torchmn.datasets.formats.files import expanded
from torchmn.errors import ArgumentError, DatasetError, nearest

SPLITS = ("train", "test")
CLASSES, COARSE_CLASSES = 100, 20
RECORD = 2 + cifar_files.PIXELS
# Suffix of the file, and folder in the archive, of each format.
FORMATS = ((".bin", "cifar-100-binary"), ("", "cifar-100-python"))


def cifar100(split: str, root: str | os.PathLike[str], *, coarse: bool = False) -> ImageSet:
    """Returns a split of CIFAR-100 as a data set of (image, label).

    Args:
        split: "train" or "test".
        root: directory with the unpacked files of the binary or the Python version, or with the folder that the
            archive contains.
        coarse: labels are the 20 groups of classes.

    Returns:
        Images (3, 32, 32), float32 in [0, 1]; labels are ints from 0 to 99, or to 19 with `coarse`.

    Raises:
        ArgumentError: for an unknown split.
        DatasetError: if a file is missing, damaged or of another kind; the message names it.
    """
    labels, pixels = cifar100_bytes(split, expanded(root), coarse)
    images = torch.from_numpy(pixels.copy()).view(-1, 3, 32, 32).to(torch.float32).div_(255)
    return ImageSet(f"cifar100 {split}", images, torch.from_numpy(labels.astype(np.int64)))


def cifar100_arrays(split: str, root: Path, coarse: bool = False) -> Arrays:
    """Returns the `split` of CIFAR-100, from the binary or the Python version."""

    def records() -> np.ndarray:
        numbers, pixels = cifar100_bytes(split, root, coarse)
        return np.concatenate([numbers[:, None], pixels], axis=1)

    rows = cache.cached(cache.digest([find(split, root)], "cifar100", coarse), records)
    return Arrays(f"cifar100 {split}", cifar_files.images_of(rows), as_labels(rows[:, 0]), 1 / 255)


def cifar100_bytes(split: str, root: Path, coarse: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels and pixels as bytes: (count,), (count, 3072)."""
    path = find(split, root)
    labels, pixels = _binary(path, coarse) if path.suffix == ".bin" else _pickled(path, coarse)
    classes = COARSE_CLASSES if coarse else CLASSES
    if labels.size and labels.max() >= classes:
        raise DatasetError(f"{path}: expected labels from 0 to {classes - 1}, got {labels.max()}.")
    return labels, pixels


def find(split: str, root: Path) -> Path:
    """Returns the file of a split, in `root` or in the folder of an archive in it."""
    if split not in SPLITS:
        raise ArgumentError(f"cifar100: split {split!r} does not exist. {nearest(split, SPLITS)}")
    for suffix, folder in FORMATS:
        for directory in (root, root / folder):
            if os.path.isfile(directory / f"{split}{suffix}"):
                return directory / f"{split}{suffix}"
    raise DatasetError(
        f"cifar100 {split}: no {split}.bin or {split} in {str(root)!r}, nor in its subfolders cifar-100-binary or "
        "cifar-100-python. Unpack cifar-100-binary.tar.gz or cifar-100-python.tar.gz there."
    )


def _binary(path: Path, coarse: bool) -> tuple[np.ndarray, np.ndarray]:
    records = cifar_files.records_of(path, RECORD)
    return records[:, 0 if coarse else 1], records[:, 2:]


def _pickled(path: Path, coarse: bool) -> tuple[np.ndarray, np.ndarray]:
    return cifar_files.read_pickled(path, labels_name="coarse_labels" if coarse else "fine_labels")
