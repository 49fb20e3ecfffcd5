"""Which items a data set has chosen of another one: what ranks can compare without reading any."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np
from torch.utils.data import ConcatDataset


def selection(dataset: Any) -> int | None:
    """A number for the choice and order of `random_split`, `Subset`, or a part of a scattered set; None for no choice.

    Ranks that split at random with other seeds would deal out items of different splits: some twice, some to nobody.
    """
    if isinstance(dataset, ConcatDataset):
        chosen = [selection(inner) for inner in dataset.datasets]
        return crc32(repr(chosen).encode()) if any(number is not None for number in chosen) else None
    indices = getattr(dataset, "indices", None)
    if indices is None or isinstance(dataset, type) or callable(indices):
        return None
    try:
        numbers = np.asarray(indices)
        if numbers.dtype.kind not in "iu" or numbers.shape != (len(dataset),):
            return None
    except Exception:  # an attribute of that name in somebody's own data set may be anything
        return None
    inner = selection(getattr(dataset, "dataset", getattr(dataset, "source", None)))
    return crc32(np.ascontiguousarray(numbers, dtype=np.int64).tobytes(), inner or 0)
