"""Reads arrays from MATLAB 5 files, the binary format of MATLAB's `save` except for its HDF5 variant, `-v7.3`."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from torchmn.errors import DatasetError

HEADER = 128
MATRIX, COMPRESSED = 14, 15
# Numeric types by their codes in the format.
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}


def read_matlab(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of numbers in a file, by name; other contents are skipped."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror}).") from error
    order = {b"IM": "<", b"MI": ">"}.get(content[HEADER - 2 : HEADER])
    if order is None:
        raise DatasetError(f"{path}: this is not a MATLAB 5 file. In MATLAB: save('FILE', 'NAME', '-v6').")
    try:
        return dict(_arrays(content[HEADER:], order))
    except (struct.error, ValueError, zlib.error, IndexError) as error:
        raise DatasetError(f"{path}: a damaged MATLAB file ({error}). Download it again.") from error


def _arrays(content: bytes, order: str) -> Iterator[tuple[str, np.ndarray]]:
    for kind, data in _elements(content, order):
        if kind == COMPRESSED:
            yield from _arrays(zlib.decompress(data), order)
        elif kind == MATRIX:
            found = _matrix(data, order)
            if found is not None:
                yield found


def _elements(content: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """Yields type and bytes of each element; small ones are stored inside their tag."""
    position = 0
    while position + 8 <= len(content):
        kind, size = struct.unpack_from(f"{order}II", content, position)
        if kind >> 16:
            kind, size, begin, step = kind & 0xFFFF, kind >> 16, position + 4, 8
        else:
            begin = position + 8
            step = 8 + size if kind == COMPRESSED else 8 + -(-size // 8) * 8
        if begin + size > len(content):
            raise ValueError(f"expected an element of {size} bytes, got {len(content) - begin}")
        yield kind, content[begin : begin + size]
        position += step


def _matrix(data: bytes, order: str) -> tuple[str, np.ndarray] | None:
    parts = [part for _, part in zip(range(4), _elements(data, order), strict=False)]
    if len(parts) < 4 or parts[3][0] not in NUMBERS:
        return None  # a structure, a text, a sparse matrix
    shape = struct.unpack(f"{order}{len(parts[1][1]) // 4}i", parts[1][1])
    kind, numbers = parts[3]
    values = np.frombuffer(numbers, dtype=f"{order}{NUMBERS[kind]}")
    if values.size != math.prod(shape):
        raise ValueError(f"expected an array of shape {shape}, got {values.size} numbers")
    return parts[2][1].decode("ascii", "replace"), values.reshape(shape, order="F")
