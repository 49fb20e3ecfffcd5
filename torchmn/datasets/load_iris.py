"""Iris: four measurements of 150 flowers of three species (R. A. Fisher, 1936)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torchmn.datasets.arrays import Arrays
from torchmn.errors import ArgumentError, nearest

CLASSES = ("setosa", "versicolor", "virginica")
FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")
SPLITS = ("train", "test", "all")
_FILE = Path(__file__).with_name("iris.csv")
_TEST_EVERY = 5


def iris(split: str = "all") -> Arrays:
    """The flowers of `split`: "all" 150, or "test" every fifth of them (30) and "train" the others.

    inputs: (count, 4), the `FEATURES`, float32, in centimetres; targets: 0 to 2, places in `CLASSES`. It comes with
    TorchMN.
    """
    if split not in SPLITS:
        raise ArgumentError(f"iris: split {split!r} does not exist. {nearest(split, SPLITS)}")
    table = np.loadtxt(_FILE, delimiter=",", skiprows=1)
    is_test = np.arange(len(table)) % _TEST_EVERY == _TEST_EVERY - 1
    table = table[{"all": np.full(len(table), True), "test": is_test, "train": ~is_test}[split]]
    return Arrays(f"iris {split}", table[:, :4].astype(np.float32), table[:, 4].astype(np.int64), classes=CLASSES)
