"""MNIST and CIFAR as arrays of bytes, memory-mapped from their files, or from a cache of their decompressed content."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from torchmn.datasets import cache, load_cifar10, load_cifar100, load_mnist
from torchmn.datasets.arrays import Arrays, labels
from torchmn.datasets.formats.idx import GZIP_MAGIC, read_idx
from torchmn.datasets.load_mnist import SPLITS

BYTE = 1 / 255


def mnist_arrays(split: str, root: Path | None) -> Arrays:
    """Returns the `split` of MNIST in `root`, or of the sample that is part of TorchMN."""
    files = SPLITS[split]
    folder = load_mnist.SAMPLE if root is None else root
    images_path, labels_path = files.images.find(folder), files.labels.find(folder)
    images = _mapped_idx(images_path, 3)
    targets = labels(read_idx(labels_path, dims=1))
    load_mnist.check(images_path, images, labels_path, targets)
    name = f"mnist {split}{' sample' if root is None else ''}"
    return Arrays(name, images[:, None], targets, BYTE, tuple("0123456789"))


def _mapped_idx(path: Path, dims: int) -> np.ndarray:
    with path.open("rb") as file:
        head = file.read(4 + 4 * dims)
    if head[:2] == GZIP_MAGIC:
        return cache.cached(cache.digest([path], "idx"), lambda: read_idx(path, dims))
    if len(head) == 4 + 4 * dims and head[:4] == bytes([0, 0, 8, dims]):
        shape = struct.unpack(f">{dims}I", head[4:])
        if path.stat().st_size == len(head) + math.prod(shape):
            return np.memmap(path, np.uint8, "r", len(head), shape)
    return read_idx(path, dims)  # raises an error that names the problem


def cifar10_arrays(split: str, root: Path) -> Arrays:
    """Returns the `split` of CIFAR-10, from the binary or the Python version."""
    paths, read = load_cifar10.find(split, root)

    def records() -> np.ndarray:
        """Returns label and pixels of each image in one row, so that one array holds both."""
        parts = [load_cifar10.checked(path, *read(path)) for path in paths]
        return np.concatenate([np.concatenate([numbers[:, None], pixels], axis=1) for numbers, pixels in parts])

    rows = cache.cached(cache.digest(paths, "cifar10"), records)
    return Arrays(f"cifar10 {split}", _images(rows), labels(rows[:, 0]), BYTE, load_cifar10.CLASSES)


def cifar100_arrays(split: str, root: Path, coarse: bool = False) -> Arrays:
    """Returns the `split` of CIFAR-100, from the binary or the Python version."""

    def records() -> np.ndarray:
        numbers, pixels = load_cifar100.cifar100_bytes(split, root, coarse)
        return np.concatenate([numbers[:, None], pixels], axis=1)

    rows = cache.cached(cache.digest([load_cifar100.find(split, root)], "cifar100", coarse), records)
    return Arrays(f"cifar100 {split}", _images(rows), labels(rows[:, 0]), BYTE)


def _images(rows: np.ndarray) -> np.ndarray:
    """Returns the pixels after the label of each row as images (count, 3, 32, 32): a read-only view."""
    return np.lib.stride_tricks.as_strided(
        rows[:, 1:], (len(rows), 3, 32, 32), (rows.strides[0], 1024, 32, 1), writeable=False
    )
