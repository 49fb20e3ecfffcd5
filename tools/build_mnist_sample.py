"""Build the MNIST sample that comes with TorchMN from the full set; the same input gives the same bytes.

    python tools/build_mnist_sample.py DIRECTORY_OF_IDX_FILES

Each class gives the same number of images, equally spaced over the file and in its order. Equally spaced,
because MNIST's files are not uniform: the first half of the test set was written by other people than the
second, and is easier.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from torchmn.datasets.formats.idx import content_sha256, read_idx, write_idx
from torchmn.datasets.load_mnist import CLASSES, SAMPLE, SPLITS

IMAGES_PER_CLASS = {"train": 600, "test": 100}


def chosen(labels: np.ndarray, per_class: int) -> np.ndarray:
    """The sorted positions of `per_class` images of each class, equally spaced among those of the class."""
    positions = []
    for digit in range(CLASSES):
        of_class = np.flatnonzero(labels == digit)
        positions.append(of_class[np.arange(per_class) * len(of_class) // per_class])
    return np.sort(np.concatenate(positions))


def build(source: Path, target: Path) -> None:
    """Write the four files of the sample to `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for split, per_class in IMAGES_PER_CLASS.items():
        files = SPLITS[split]
        paths = [file.find(source) for file in (files.images, files.labels)]
        for file, path in zip((files.images, files.labels), paths, strict=True):
            if content_sha256(path) != file.sha256:
                raise SystemExit(f"{path} is not MNIST's {file.name}; the sample comes from the real one.")
        images, labels = read_idx(paths[0], dims=3), read_idx(paths[1], dims=1)
        positions = chosen(labels, per_class)
        write_idx(target / files.images.name, images[positions])
        write_idx(target / files.labels.name, labels[positions])
        print(f"{split}: {len(positions)} of {len(labels)} images")
    size = sum(path.stat().st_size for path in target.glob("*.gz"))
    print(f"{target}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the MNIST sample that comes with TorchMN.")
    parser.add_argument("source", type=Path, help="a directory with MNIST's four IDX files")
    parser.add_argument("--target", type=Path, default=SAMPLE, help="default: %(default)s")
    arguments = parser.parse_args()
    build(arguments.source, arguments.target)
