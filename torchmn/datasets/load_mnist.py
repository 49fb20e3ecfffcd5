"""MNIST: handwritten digits, 28 x 28 pixels, ten classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from torchmn.datasets.errors import DatasetError
from torchmn.datasets.fetch import content_sha256, fetch
from torchmn.datasets.idx import read_idx
from torchmn.datasets.image_set import ImageSet
from torchmn.datasets.mnist_files import MIRRORS, SPLITS, MnistSplit
from torchmn.errors import ArgumentError, nearest

SAMPLE = Path(__file__).parent / "mnist_sample"
SIDE = 28
CLASSES = 10


def mnist(
    split: str = "train",
    root: str | os.PathLike[str] | None = None,
    *,
    download: bool = False,
    mirrors: str | Sequence[str] = MIRRORS,
) -> ImageSet:
    """The digits of `split` ("train" or "test") as a dataset of (image, label).

    image: (1, 28, 28), float32 in [0, 1]; label: int, 0 to 9

    `mnist()` gives the sample that comes with TorchMN: 6,000 training and 1,000 test images, no network.
    `root=DIR` reads the IDX files in that directory, gzipped or not, as published or as torchvision keeps
    them. `download=True` first fetches what is missing into `root` (default: ~/.cache/torchmn/mnist), and
    checks the content of all files, also of those that were there. It never overwrites a file. `mirrors` are
    the URLs of folders that hold the files, tried in turn.

    A file that is missing, damaged or of another kind is a DatasetError that names it.

    With several ranks per machine, let one of them download and the others wait:

        if comm.intra_rank == 0:
            torchmn.datasets.mnist("train", download=True)
        comm.barrier()
        train = torchmn.datasets.mnist("train", download=True)
    """
    if not isinstance(split, str) or split not in SPLITS:
        raise ArgumentError(f"mnist: split {split!r} does not exist. {nearest(split, SPLITS)}")
    files = SPLITS[split]
    if root is None and not download:
        return load(f"mnist {split} sample", files, SAMPLE)
    directory = default_root() if root is None else Path(root).expanduser()
    if download:
        ensure(files, directory, (mirrors,) if isinstance(mirrors, str) else mirrors)
    return load(f"mnist {split}", files, directory)


def default_root() -> Path:
    """Where `download=True` keeps the files when no root is given."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torchmn" / "mnist"


def ensure(files: MnistSplit, root: Path, mirrors: Sequence[str]) -> None:
    """Fetch what `root` lacks of `files`; a file that is there and has another content is a DatasetError."""
    for file in (files.images, files.labels):
        present = file.locate(root)
        if present is None:
            fetch(file.name, file.sha256, root, mirrors)
        elif (got := content_sha256(present)) != file.sha256:
            raise DatasetError(
                f"{present}: this is not MNIST's {file.name}: expected SHA-256 {file.sha256} of the unpacked "
                f"content, got {got}. Remove it to have it downloaded, name another root, or leave out "
                f"download=True to read it as it is."
            )


def load(name: str, files: MnistSplit, root: Path) -> ImageSet:
    """The images and labels of `files` in `root`, checked against each other."""
    images_path, labels_path = files.images.find(root), files.labels.find(root)
    images = read_idx(images_path, dims=3)
    labels = read_idx(labels_path, dims=1)
    check(images_path, images, labels_path, labels)
    # A copy of each: NumPy's arrays stand on read-only bytes, and a tensor must be writable.
    pixels = torch.from_numpy(images.copy()).to(torch.float32).div_(255).unsqueeze(1)
    return ImageSet(name, pixels, torch.from_numpy(labels.copy()).to(torch.int64))


def check(images_path: Path, images: np.ndarray, labels_path: Path, labels: np.ndarray) -> None:
    """Raise a DatasetError where images and labels are not MNIST's, or do not belong together."""
    if images.shape[1:] != (SIDE, SIDE):
        raise DatasetError(
            f"{images_path}: expected images of {SIDE} x {SIDE}, got {' x '.join(map(str, images.shape[1:]))}."
        )
    if len(images) != len(labels):
        raise DatasetError(
            f"{images_path} holds {len(images)} images, but {labels_path} {len(labels)} labels: they do not "
            f"belong together. Get both from the same place."
        )
    if labels.size and labels.max() >= CLASSES:
        raise DatasetError(
            f"{labels_path}: expected labels from 0 to {CLASSES - 1}, got {labels.max()} at position {labels.argmax()}."
        )
