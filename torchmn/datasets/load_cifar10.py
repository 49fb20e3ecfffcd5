"""CIFAR-10: small colour photographs, 32 x 32 pixels, ten classes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from torchmn.datasets.arrays import ImageSet
from torchmn.datasets.formats.cifar_files import read_binary, read_pickled
from torchmn.errors import ArgumentError, DatasetError, nearest

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
STEMS = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
# How a format names its files, the folder that its archive unpacks to, and who reads it. The faster one first.
FORMATS = ((".bin", "cifar-10-batches-bin", read_binary), ("", "cifar-10-batches-py", read_pickled))


def cifar10(split: str, root: str | os.PathLike[str]) -> ImageSet:
    """The photographs of `split` ("train" or "test") as a dataset of (image, label).

    image: (3, 32, 32), float32 in [0, 1], red, green, blue; label: int, 0 to 9, a place in the list
    `torchmn.datasets.load_cifar10.CLASSES`

    `root` holds the unpacked files of the binary or the Python version, or the folder that the archive unpacks to.
    The Python version is read without running anything that its pickles may hold. A file that is missing, damaged or
    of another kind is a DatasetError that names it.

    All of it takes 600 MB as float32. On many ranks, let one read it and hand out the parts:

        train = torchmn.datasets.cifar10("train", root) if comm.rank == 0 else None
        train = torchmn.scatter_dataset(train, comm, shuffle=True, seed=0)
    """
    if not isinstance(split, str) or split not in STEMS:
        raise ArgumentError(f"cifar10: split {split!r} does not exist. {nearest(split, STEMS)}")
    paths, read = find(split, Path(root).expanduser())
    parts = [checked(path, *read(path)) for path in paths]
    labels = torch.from_numpy(np.concatenate([labels for labels, _ in parts])).to(torch.int64)
    pixels = torch.from_numpy(np.concatenate([pixels for _, pixels in parts]))
    return ImageSet(f"cifar10 {split}", pixels.view(-1, 3, 32, 32).to(torch.float32).div_(255), labels)


def checked(path: Path, labels: np.ndarray, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels and pixels of a file; a DatasetError if these are no labels of CIFAR-10."""
    if labels.size and labels.max() >= len(CLASSES):
        raise DatasetError(
            f"{path}: expected labels from 0 to {len(CLASSES) - 1}, got {labels.max()} at position {labels.argmax()}. "
            "Is this CIFAR-100?"
        )
    return labels, pixels


def find(split: str, root: Path):
    """The files of a split, all of one format, and what reads them."""
    if not root.is_dir():
        raise DatasetError(f"root {str(root)!r} is not a directory; it should hold CIFAR-10's files.")
    missing = []
    for suffix, folder, read in FORMATS:
        for place in (root, root / folder):
            paths = [place / f"{stem}{suffix}" for stem in STEMS[split]]
            absent = [path for path in paths if not path.is_file()]
            if not absent:
                return paths, read
            if len(absent) < len(paths):
                missing.append(", ".join(path.name for path in absent))
    present = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) or "nothing"
    looked_for = " or ".join(f"{STEMS[split][0]}{suffix}" for suffix, _, _ in FORMATS)
    lacks = f"{'; '.join(missing)} is missing" if missing else f"no {looked_for}"
    raise DatasetError(
        f"cifar10 {split}: {lacks} in {str(root)!r} (which holds: {present}), nor in "
        f"{' or '.join(folder for _, folder, _ in FORMATS)} in it. Unpack cifar-10-binary.tar.gz or "
        "cifar-10-python.tar.gz there."
    )
