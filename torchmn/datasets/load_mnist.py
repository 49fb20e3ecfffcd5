"""`mnist`: handwritten digits of 28 x 28 pixels in ten classes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torchmn.datasets import cache
from torchmn.datasets.arrays import Arrays, ImageSet
from torchmn.datasets.arrays import labels as as_labels
from torchmn.datasets.formats.download import fetch
from torchmn.datasets.formats.files import entries_of, expanded, open_regular, reading, size_of
from torchmn.datasets.formats.idx import GZIP_MAGIC, content_sha256, header_size, read_idx, shape_in
from torchmn.errors import ArgumentError, DatasetError, nearest

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


@dataclass(frozen=True)
class MnistFile:
    """One of the four files of MNIST."""

    stem: str
    dims: int
    sha256: str
    """Of the decompressed content, because mirrors compress it differently."""

    @property
    def name(self) -> str:
        """The name of the file on mirrors."""
        return f"{self.stem}-idx{self.dims}-ubyte.gz"

    @property
    def names(self) -> tuple[str, ...]:
        """All usual names of the file; decompressed ones first, because they load faster."""
        unpacked = f"{self.stem}-idx{self.dims}-ubyte", f"{self.stem}.idx{self.dims}-ubyte"
        return *unpacked, *(f"{name}.gz" for name in unpacked)

    def locate(self, root: Path) -> Path | None:
        """Returns the path of the file in `root`, or in torchvision's folders in it; None if it does not exist."""
        folders = root, root / "raw", root / "MNIST" / "raw"
        paths = (folder / name for folder in folders for name in self.names)
        return next((path for path in paths if os.path.isfile(path)), None)

    def find(self, root: Path) -> Path:
        """Returns the path of the file; raises a DatasetError if it does not exist."""
        path = self.locate(root)
        if path is not None:
            return path
        if not os.path.isdir(root):
            raise DatasetError(f"root {str(root)!r} is not a directory; expected a directory with MNIST's IDX files.")
        present = ", ".join(entry.name for entry in entries_of(root)[:8]) or "nothing"
        raise DatasetError(
            f"no {self.name} in {str(root)!r} (which contains: {present}). Looked for {', '.join(self.names)}, "
            f"also in raw/ and MNIST/raw/. Pass download=True to download it there, or omit root for the "
            f"sample that is part of TorchMN."
        )


@dataclass(frozen=True)
class MnistSplit:
    """The files of images and labels of one split."""

    images: MnistFile
    labels: MnistFile


SPLITS = {
    "train": MnistSplit(
        MnistFile("train-images", 3, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        MnistFile("train-labels", 1, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    ),
    "test": MnistSplit(
        MnistFile("t10k-images", 3, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        MnistFile("t10k-labels", 1, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
}


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
    """Returns a split of MNIST as a data set of (image, label).

    By default it is the sample that is part of TorchMN: 6,000 training and 1,000 test images. With several ranks per
    host, one of them should download and the others wait::

        if comm.intra_rank == 0:
            torchmn.datasets.mnist("train", download=True)
        comm.barrier()
        train = torchmn.datasets.mnist("train", download=True)

    Args:
        split: "train" or "test".
        root: directory with the IDX files, gzipped or not, with their published names or in torchvision's folders.
        download: download missing files to `root` (default: ~/.cache/torchmn/mnist), and verify the content of all
            files. Files are never overwritten.
        mirrors: URLs of directories with the files, tried in this order.

    Returns:
        Images (1, 28, 28), float32 in [0, 1]; labels are ints from 0 to 9.

    Raises:
        ArgumentError: for an unknown split.
        DatasetError: if a file is missing, damaged or of another kind; the message names it.
    """
    if not isinstance(split, str) or split not in SPLITS:
        raise ArgumentError(f"mnist: split {split!r} does not exist. {nearest(split, SPLITS)}")
    files = SPLITS[split]
    if root is None and not download:
        return load(f"mnist {split} sample", files, SAMPLE)
    directory = default_root() if root is None else expanded(root)
    if download:
        ensure(files, directory, (mirrors,) if isinstance(mirrors, str) else mirrors)
    return load(f"mnist {split}", files, directory)


def default_root() -> Path:
    """Returns the directory for downloaded files if no root is given."""
    folder = cache.user_folder()
    if folder is None:
        raise DatasetError("there is no home directory to download to. Set HOME or XDG_CACHE_HOME, or pass root.")
    return folder / "mnist"


def ensure(files: MnistSplit, root: Path, mirrors: Sequence[str]) -> None:
    """Downloads the `files` that `root` lacks; raises a DatasetError if an existing file has other content."""
    for file in (files.images, files.labels):
        present = file.locate(root)
        if present is None:
            fetch(file.name, file.sha256, root, mirrors)
        elif (got := content_sha256(present)) != file.sha256:
            raise DatasetError(
                f"{present}: this is not MNIST's {file.name}: expected SHA-256 {file.sha256} of the decompressed "
                f"content, got {got}. Remove it to have it downloaded, pass another root, or omit download=True to "
                f"read it as it is."
            )


def load(name: str, files: MnistSplit, root: Path) -> ImageSet:
    """Returns the images and labels of `files` in `root`, checked against each other."""
    images_path, labels_path = files.images.find(root), files.labels.find(root)
    images = read_idx(images_path, dims=3)
    labels = read_idx(labels_path, dims=1)
    check(images_path, images, labels_path, labels)
    # Copied, because the arrays are read-only and tensors are writable.
    pixels = torch.from_numpy(images.copy()).to(torch.float32).div_(255).unsqueeze(1)
    return ImageSet(name, pixels, torch.from_numpy(labels.copy()).to(torch.int64))


def mnist_arrays(split: str, root: Path | None) -> Arrays:
    """Returns the `split` of MNIST in `root`, or of the sample that is part of TorchMN."""
    files = SPLITS[split]
    folder = SAMPLE if root is None else root
    images_path, labels_path = files.images.find(folder), files.labels.find(folder)
    images = _mapped_idx(images_path, 3)
    targets = as_labels(read_idx(labels_path, dims=1))
    check(images_path, images, labels_path, targets)
    name = f"mnist {split}{' sample' if root is None else ''}"
    return Arrays(name, images[:, None], targets, 1 / 255, tuple("0123456789"))


def _mapped_idx(path: Path, dims: int) -> np.ndarray:
    with reading(path, "an IDX file"), open_regular(path) as file:
        head = file.read(header_size(dims))
        if head[:2] != GZIP_MAGIC:
            shape = shape_in(path, head, dims)
            if math.prod(shape) and size_of(file) == len(head) + math.prod(shape):
                return np.memmap(file, np.uint8, "r", len(head), shape)
            return read_idx(path, dims)  # an empty array, or an error that names the problem
    return cache.cached(cache.digest([path], "idx"), lambda: read_idx(path, dims))


def check(images_path: Path, images: np.ndarray, labels_path: Path, labels: np.ndarray) -> None:
    """Raises a DatasetError if images and labels are not MNIST's, or differ in number."""
    if not len(images):
        raise DatasetError(f"{images_path}: expected at least one image, got none. Download the file again.")
    if images.shape[1:] != (SIDE, SIDE):
        raise DatasetError(
            f"{images_path}: expected images of {SIDE} x {SIDE}, got {' x '.join(map(str, images.shape[1:]))}."
        )
    if len(images) != len(labels):
        raise DatasetError(
            f"{images_path} contains {len(images)} images, but {labels_path} {len(labels)} labels. Download both from "
            f"the same source."
        )
    if labels.size and labels.max() >= CLASSES:
        raise DatasetError(
            f"{labels_path}: expected labels from 0 to {CLASSES - 1}, got {labels.max()} at position {labels.argmax()}."
        )
