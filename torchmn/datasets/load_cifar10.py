"""`cifar10`: colour photographs of 32 x 32 pixels in ten classes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from torchmn.datasets import cache
from torchmn.datasets.arrays import Arrays, ImageSet
from torchmn.datasets.arrays import labels as as_labels
from torchmn.datasets.formats.cifar_files import images_of, read_binary, read_pickled
from torchmn.datasets.formats.files import entries_of, expanded
from torchmn.errors import ArgumentError, DatasetError, nearest

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
STEMS = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
# Suffix of the files, folder in the archive, and reader of each format; the faster one first.
FORMATS = ((".bin", "cifar-10-batches-bin", read_binary), ("", "cifar-10-batches-py", read_pickled))


def cifar10(split: str, root: str | os.PathLike[str]) -> ImageSet:
    """Returns a split of CIFAR-10 as a data set of (image, label).

    The training split has 600 MB as float32. With several ranks, one of them can read it and send the others their
    parts:

        train = torchmn.datasets.cifar10("train", root) if comm.rank == 0 else None
        train = torchmn.scatter_dataset(train, comm, shuffle=True, seed=0)

    Args:
        split: "train" or "test".
        root: directory with the unpacked files of the binary or the Python version, or with the folder that the
            archive contains. Pickles of the Python version are read without running code in them.

    Returns:
        Images (3, 32, 32), float32 in [0, 1], red, green, blue; labels are ints from 0 to 9, indices into
        `torchmn.datasets.load_cifar10.CLASSES`.

    Raises:
        ArgumentError: for an unknown split.
        DatasetError: if a file is missing, damaged or of another kind; the message names it.
    """
    if not isinstance(split, str) or split not in STEMS:
        raise ArgumentError(f"cifar10: split {split!r} does not exist. {nearest(split, STEMS)}")
    paths, read = find(split, expanded(root))
    parts = [checked(path, *read(path)) for path in paths]
    labels = torch.from_numpy(np.concatenate([labels for labels, _ in parts])).to(torch.int64)
    pixels = torch.from_numpy(np.concatenate([pixels for _, pixels in parts]))
    return ImageSet(f"cifar10 {split}", pixels.view(-1, 3, 32, 32).to(torch.float32).div_(255), labels)


def cifar10_arrays(split: str, root: Path) -> Arrays:
    """Returns the `split` of CIFAR-10, from the binary or the Python version."""
    paths, read = find(split, root)

    def records() -> np.ndarray:
        """Returns label and pixels of each image in one row, so that one array holds both."""
        parts = [checked(path, *read(path)) for path in paths]
        return np.concatenate([np.concatenate([numbers[:, None], pixels], axis=1) for numbers, pixels in parts])

    rows = cache.cached(cache.digest(paths, "cifar10"), records)
    return Arrays(f"cifar10 {split}", images_of(rows), as_labels(rows[:, 0]), 1 / 255, CLASSES)


def checked(path: Path, labels: np.ndarray, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels and pixels of a file; raises a DatasetError if labels are out of range."""
    if labels.size and labels.max() >= len(CLASSES):
        raise DatasetError(
            f"{path}: expected labels from 0 to {len(CLASSES) - 1}, got {labels.max()} at position {labels.argmax()}. "
            "Is this CIFAR-100?"
        )
    return labels, pixels


def find(split: str, root: Path) -> tuple[list[Path], Callable[[Path], tuple[np.ndarray, np.ndarray]]]:
    """Returns the files of a split, all of one format, and the function that reads one of them."""
    if not os.path.isdir(root):
        raise DatasetError(f"root {str(root)!r} is not a directory; expected a directory with CIFAR-10's files.")
    missing = []
    for suffix, folder, read in FORMATS:
        for directory in (root, root / folder):
            paths = [directory / f"{stem}{suffix}" for stem in STEMS[split]]
            absent = [path for path in paths if not os.path.isfile(path)]
            if not absent:
                return paths, read
            if len(absent) < len(paths):
                missing.append(", ".join(path.name for path in absent))
    present = ", ".join(entry.name for entry in entries_of(root)[:8]) or "nothing"
    expected = " or ".join(f"{STEMS[split][0]}{suffix}" for suffix, _, _ in FORMATS)
    problem = f"{'; '.join(missing)} is missing" if missing else f"no {expected}"
    raise DatasetError(
        f"cifar10 {split}: {problem} in {str(root)!r} (which contains: {present}), nor in its subfolders "
        f"{' or '.join(folder for _, folder, _ in FORMATS)}. Unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz "
        "there."
    )
