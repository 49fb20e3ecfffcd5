"""`sparsenet`: patches of the ten photographs of nature of Olshausen and Field (1996)."""

from __future__ import annotations

import os

import numpy as np

from torchmn.datasets.arrays import Arrays
from torchmn.datasets.formats.files import expanded
from torchmn.datasets.formats.matlab import read_matlab
from torchmn.errors import DatasetError

FILES = {True: "IMAGES.mat", False: "IMAGES_RAW.mat"}
SIDE, PATCH = 512, 16


def sparsenet(root: str | os.PathLike[str], *, whitened: bool = True) -> Arrays:
    """Returns the patches (10240, 1, 16, 16), float32; targets are the inputs, because there are no labels.

    Args:
        root: directory with IMAGES.mat (whitened) or IMAGES_RAW.mat.
        whitened: which of the two files to read.

    Returns:
        The patches, as inputs and as targets.

    Raises:
        DatasetError: if the file cannot be read, or does not contain the photographs.
    """
    path = expanded(root) / FILES[whitened]
    images = [array for array in read_matlab(path).values() if array.ndim == 3 and array.shape[:2] == (SIDE, SIDE)]
    if len(images) != 1 or not images[0].size:
        raise DatasetError(f"sparsenet: expected one array of {SIDE} x {SIDE} x images in {path}, got {len(images)}.")
    if not (np.abs(images[0]) <= np.finfo(np.float32).max).all():
        raise DatasetError(f"sparsenet: expected finite values of float32 in {path}.")
    count, across = images[0].shape[2], SIDE // PATCH
    patches = images[0].reshape(across, PATCH, across, PATCH, count).transpose(4, 0, 2, 1, 3)
    patches = np.ascontiguousarray(patches, np.float32).reshape(-1, 1, PATCH, PATCH)
    return Arrays("sparsenet train", patches, patches)
