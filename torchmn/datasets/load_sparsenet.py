"""Ten photographs of nature, as Olshausen and Field used them (1996), in pieces of 16 x 16."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from torchmn.datasets.arrays import Arrays
from torchmn.datasets.formats.matlab import read_matlab
from torchmn.errors import DatasetError

FILES = {True: "IMAGES.mat", False: "IMAGES_RAW.mat"}
SIDE, PIECE = 512, 16


def sparsenet(root: str | os.PathLike[str], *, whitened: bool = True) -> Arrays:
    """The pieces (10240, 1, 16, 16), which are their own targets: there are no labels.

    root: a folder with IMAGES.mat (whitened) or IMAGES_RAW.mat (as photographed)
    """
    path = Path(root).expanduser() / FILES[whitened]
    images = [array for array in read_matlab(path).values() if array.ndim == 3 and array.shape[:2] == (SIDE, SIDE)]
    if len(images) != 1:
        raise DatasetError(f"sparsenet: expected one array of {SIDE} x {SIDE} x images in {path}, got {len(images)}.")
    count, across = images[0].shape[2], SIDE // PIECE
    pieces = images[0].astype(np.float32).reshape(across, PIECE, across, PIECE, count).transpose(4, 0, 2, 1, 3)
    pieces = np.ascontiguousarray(pieces).reshape(-1, 1, PIECE, PIECE)
    return Arrays("sparsenet train", pieces, pieces)
