"""An array from a MATLAB 5 file, the binary format of `save` from 1996 to this day (but for its HDF5 variant)."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import numpy as np

from torchmn.errors import DatasetError

HEADER = 128
MATRIX, COMPRESSED = 14, 15
# The types of numbers on disk, by the format's codes.
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}


def read_matlab(path: Path) -> dict[str, np.ndarray]:
    """The arrays of numbers in a file, by their names; what else it holds is left out."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path}: can not be read ({error.strerror}).") from error
    order = {b"IM": "<", b"MI": ">"}.get(content[HEADER - 2 : HEADER])
    if order is None:
        raise DatasetError(f"{path}: this is no file of MATLAB 5 or newer. In MATLAB: save('FILE', 'NAME', '-v6').")
    try:
        return dict(_arrays(content[HEADER:], order))
    except (struct.error, ValueError, zlib.error, IndexError) as error:
        raise DatasetError(f"{path}: a damaged MATLAB file ({error}). Get it again.") from error


def _arrays(content: bytes, order: str):
    for kind, data in _elements(content, order):
        if kind == COMPRESSED:
            yield from _arrays(zlib.decompress(data), order)
        elif kind == MATRIX:
            found = _matrix(data, order)
            if found is not None:
                yield found


def _elements(content: bytes, order: str):
    """The type and the bytes of each element; small ones stand inside of their tag."""
    at = 0
    while at + 8 <= len(content):
        kind, size = struct.unpack_from(f"{order}II", content, at)
        if kind >> 16:
            kind, size, begin, step = kind & 0xFFFF, kind >> 16, at + 4, 8
        else:
            begin = at + 8
            step = 8 + size if kind == COMPRESSED else 8 + -(-size // 8) * 8
        if begin + size > len(content):
            raise ValueError(f"an element of {size} bytes, of which {len(content) - begin} are there")
        yield kind, content[begin : begin + size]
        at += step


def _matrix(data: bytes, order: str) -> tuple[str, np.ndarray] | None:
    parts = [part for _, part in zip(range(4), _elements(data, order), strict=False)]
    if len(parts) < 4 or parts[3][0] not in NUMBERS:
        return None  # a structure, a text, a sparse matrix
    shape = struct.unpack(f"{order}{len(parts[1][1]) // 4}i", parts[1][1])
    kind, numbers = parts[3]
    values = np.frombuffer(numbers, dtype=f"{order}{NUMBERS[kind]}")
    if values.size != math.prod(shape):
        raise ValueError(f"{values.size} numbers for an array of {shape}")
    return parts[2][1].decode("ascii", "replace"), values.reshape(shape, order="F")
