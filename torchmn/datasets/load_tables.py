"""Tables: `iris`, measurements of flowers (R. A. Fisher, 1936), and `housing`, prices of houses in Boston (UCI)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from torchmn.datasets.arrays import Arrays
from torchmn.datasets.formats.files import expanded, read_regular, reading
from torchmn.errors import ArgumentError, DatasetError, nearest

FILE = "housing.data"
SUBURBS, NUMBERS = 506, 14
MAX_BYTES = 1 << 20
"""Of the file; UCI's has 49,082."""


def housing(root: str | os.PathLike[str]) -> Arrays:
    """Returns inputs (506, 13) and prices (506, 1), float32, of UCI's file housing.data.

    Args:
        root: the file, or the directory that contains it.

    Returns:
        The inputs and prices of the split.

    Raises:
        DatasetError: if the file cannot be read, or is another one.
    """
    path = expanded(root)
    path = path / FILE if os.path.isdir(path) else path
    with reading(path, f"UCI's file {FILE}"):
        words = read_regular(path, MAX_BYTES).split()
        try:
            values = np.array([float(word) for word in words])
        except ValueError as error:
            raise DatasetError(f"housing: {path} contains something other than numbers ({str(error)[:60]}).") from error
    if values.size != SUBURBS * NUMBERS:
        raise DatasetError(
            f"housing: expected {SUBURBS} x {NUMBERS} numbers in {path}, got {values.size}. Download UCI's file again."
        )
    if not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise DatasetError(f"housing: expected finite numbers in {path}. Download UCI's file again.")
    table = values.reshape(SUBURBS, NUMBERS).astype(np.float32)
    return Arrays("housing train", table[:, :-1], table[:, -1:])


CLASSES = ("setosa", "versicolor", "virginica")
FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")
SPLITS = ("train", "test", "all")
_FILE = Path(__file__).with_name("iris.csv")
_TEST_EVERY = 5


def iris(split: str = "all") -> Arrays:
    """Returns four measurements of each of 150 flowers of three species; the data is part of TorchMN.

    Args:
        split: "all"; "test", every fifth flower (30); or "train", the others.

    Returns:
        Inputs (count, 4), the `FEATURES` in centimetres, float32, and labels (count,), indices into `CLASSES`.

    Raises:
        ArgumentError: for an unknown split.
    """
    if split not in SPLITS:
        raise ArgumentError(f"iris: split {split!r} does not exist. {nearest(split, SPLITS)}")
    table = np.loadtxt(_FILE, delimiter=",", skiprows=1)
    is_test = np.arange(len(table)) % _TEST_EVERY == _TEST_EVERY - 1
    table = table[{"all": np.full(len(table), True), "test": is_test, "train": ~is_test}[split]]
    return Arrays(f"iris {split}", table[:, :4].astype(np.float32), table[:, 4].astype(np.int64), classes=CLASSES)
