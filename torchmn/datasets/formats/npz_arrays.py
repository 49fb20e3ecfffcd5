"""Reads single arrays of an .npz file, after comparing their sizes with the file; never Python objects."""

from __future__ import annotations

import io
import math
import zipfile

import numpy as np

from torchmn.context import process
from torchmn.datasets.formats.files import DEFLATE_RATIO

MAX_HEADER = CHUNK = 1 << 16
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Those that NumPy writes; others need much more memory than their size."""


def array_of(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Returns an array; raises an error of any type if it is damaged."""
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type not in METHODS:
        raise ValueError(f"{name} is compressed by method {member.compress_type}, which NumPy does not use")
    if member.file_size > member.compress_size * DEFLATE_RATIO:
        raise ValueError(f"{name} has {member.compress_size} bytes, too few for the announced {member.file_size}")
    with archive.open(member) as content:
        header = io.BytesIO(content.read(MAX_HEADER))
        shape, is_fortran, dtype = _described(header)
        if dtype.hasobject:
            raise ValueError(f"{name} has Python objects, which might run code")
        count = math.prod(shape)
        if min(shape, default=0) < 0 or count * dtype.itemsize != member.file_size - header.tell():
            raise ValueError(f"{name}: expected an array of shape {shape}, got {member.file_size} bytes")
        values = np.empty(count, dtype)
        target, filled = values.view(np.uint8).data, 0  # a view, so that the content is in memory once
        while chunk := header.read() or content.read(CHUNK):  # the last read compares the checksum
            target[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        if filled < len(target):
            raise EOFError(f"{name} ends after {filled} of {len(target)} bytes")
    return values.reshape(shape, order="F" if is_fortran else "C")


def _described(header: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Returns shape, order and dtype, and leaves `header` where the values begin."""
    version = np.lib.format.read_magic(header)
    if version not in ((1, 0), (2, 0)):  # 3.0 is for names of fields
        raise ValueError(f"expected version 1.0 or 2.0 of the .npy format, got {version[0]}.{version[1]}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with process.numpy_files:  # NumPy parses headers with `ast`, which is not thread-safe in Python 3.11
        return read(header)
