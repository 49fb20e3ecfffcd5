"""The Boston housing data: 13 numbers about each of 506 suburbs, and the median price of a house there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from torchmn.datasets.arrays import Arrays
from torchmn.datasets.errors import DatasetError

FILE = "housing.data"
SUBURBS, NUMBERS = 506, 14


def housing(root: str | os.PathLike[str]) -> Arrays:
    """Inputs (506, 13) and prices (506, 1), as they stand in the file housing.data, which is `root` or lies in it."""
    path = Path(root).expanduser()
    path = path / FILE if path.is_dir() else path
    try:
        words = path.read_text(encoding="ascii").split()
        values = np.array(words, dtype=np.float64)
    except OSError as error:
        raise DatasetError(f"housing: {path} can not be read ({error.strerror}). It is UCI's file {FILE}.") from error
    except ValueError as error:
        raise DatasetError(f"housing: {path} holds something else than numbers ({str(error)[:60]}).") from error
    if values.size != SUBURBS * NUMBERS:
        raise DatasetError(
            f"housing: expected {SUBURBS} x {NUMBERS} numbers in {path}, got {values.size}. Get UCI's file again."
        )
    table = values.reshape(SUBURBS, NUMBERS).astype(np.float32)
    return Arrays("housing train", table[:, :-1], table[:, -1:])
