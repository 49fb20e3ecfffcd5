"""Reads and writes files in the IDX format: a magic number, the extent of each dim, then the values as bytes.

byte 0, 1: zero
byte 2: type of the values; 8 is unsigned byte, the only type in MNIST and similar data sets
byte 3: number of dims
then: one 32-bit big-endian extent per dim, and the values in C order
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from torchmn.errors import DatasetError

UNSIGNED_BYTE = 8
GZIP_MAGIC = b"\x1f\x8b"


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file, decompressed if it is gzipped.

    This depends on the first bytes, not on the name: some browsers decompress a download and keep its `.gz`.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DatasetError(
            f"{path}: a damaged or truncated gzip file of {len(content)} bytes ({error}). Download the file again."
        ) from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror}).") from error


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Returns the values of an IDX file as an array with `dims` dims; raises a DatasetError for other files."""
    content = read_bytes(path)
    magic = bytes([0, 0, UNSIGNED_BYTE, dims])
    header_size = 4 + 4 * dims
    if content[:4] != magic:
        found = f"starts with {content[:4].hex(' ')}" if content else "is empty"
        raise DatasetError(
            f"{path}: {found}, but an IDX file of {dims} dims of bytes starts with {magic.hex(' ')}. "
            f"Is this the right file? An HTML page saved under its name is a common cause."
        )
    if len(content) < header_size:
        raise DatasetError(
            f"{path}: truncated in its header: expected at least {header_size} bytes, got {len(content)}. "
            f"Download the file again."
        )
    shape = struct.unpack(f">{dims}I", content[4:header_size])
    expected, got = math.prod(shape), len(content) - header_size
    if got != expected:
        raise DatasetError(
            f"{path}: {'truncated' if got < expected else 'too long'}: expected {' x '.join(map(str, shape))} = "
            f"{expected} bytes after the header, got {got}. Download the file again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_size).reshape(shape)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Writes unsigned bytes as a gzipped IDX file; equal values give identical files."""
    header = bytes([0, 0, UNSIGNED_BYTE, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    # Without time stamp and name in the gzip header, which would differ between runs.
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes(), compresslevel=9, mtime=0))
