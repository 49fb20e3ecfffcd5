"""Reads and writes files in the IDX format: a magic number, the extent of each dim, then the values as bytes.

byte 0, 1: zero
byte 2: type of the values; 8 is unsigned byte, the only type in MNIST and similar data sets
byte 3: number of dims
then: one 32-bit big-endian extent per dim, and the values in C order
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from torchmn.datasets.formats.files import check_fits, most_unpacked, open_regular, reading, size_of
from torchmn.errors import DatasetError

UNSIGNED_BYTE = 8
GZIP_MAGIC = b"\x1f\x8b"
MAX_UNPACKED = 1 << 30
"""Bytes of a gzipped file of which the digest is computed; MNIST has 47 million."""


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[BinaryIO, int | None]]:
    """Opens a file, to be decompressed while it is read if it is gzipped; a DatasetError if it is damaged.

    This depends on the first bytes, not on the name: some browsers decompress a download and keep its `.gz`.

    Yields:
        The content, and the number of its bytes, None if it is gzipped.
    """
    with reading(path, "an IDX file"), open_regular(path) as file:
        size = size_of(file)
        is_packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        file.seek(0)
        if not is_packed:
            yield file, size
            return
        try:
            with gzip.GzipFile(fileobj=file) as content:
                yield cast("BinaryIO", content), None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DatasetError(
                f"{path}: a damaged or truncated gzip file of {size} bytes ({error}). Download the file again."
            ) from error


def content_sha256(path: Path) -> str:
    """Returns the SHA-256 of the content of a file, decompressed if it is gzipped."""
    digest, size = hashlib.sha256(), 0
    with unpacked(path) as (content, _):
        while chunk := content.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
            if size > MAX_UNPACKED:
                raise DatasetError(f"{path}: expected a file that unpacks to at most {MAX_UNPACKED} bytes.")
    return digest.hexdigest()


def shape_in(path: Path, header: bytes, dims: int) -> tuple[int, ...]:
    """Returns the shape that the first bytes of an IDX file announce; raises a DatasetError for other files."""
    magic = bytes([0, 0, UNSIGNED_BYTE, dims])
    if header[:4] != magic:
        found = f"starts with {header[:4].hex(' ')}" if header else "is empty"
        raise DatasetError(
            f"{path}: {found}, but an IDX file of {dims} dims of bytes starts with {magic.hex(' ')}. "
            f"Is this the right file? An HTML page saved under its name is a common cause."
        )
    if len(header) < header_size(dims):
        raise DatasetError(
            f"{path}: truncated in its header: expected at least {header_size(dims)} bytes, got {len(header)}. "
            f"Download the file again."
        )
    return struct.unpack(f">{dims}I", header[4:])


def header_size(dims: int) -> int:
    """Returns the number of bytes before the values."""
    return 4 + 4 * dims


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Returns the values of an IDX file as an array with `dims` dims; raises a DatasetError for other files."""
    with unpacked(path) as (content, size):
        shape = shape_in(path, content.read(header_size(dims)), dims)
        expected = math.prod(shape)
        most = most_unpacked(path.stat().st_size) if size is None else size - header_size(dims)
        if expected > most or (size is not None and expected < most):
            raise _wrong_size(path, shape, f"{'at most ' if size is None else ''}{most}", expected > most)
        check_fits(path, expected)
        values = content.read(expected)
        if len(values) < expected or content.read(1):
            got = f"{len(values)}" if len(values) < expected else "more"
            raise _wrong_size(path, shape, got, len(values) < expected)
        return np.frombuffer(values, dtype=np.uint8).reshape(shape)


def _wrong_size(path: Path, shape: tuple[int, ...], got: str, is_short: bool) -> DatasetError:
    return DatasetError(
        f"{path}: {'truncated' if is_short else 'too long'}: expected {' x '.join(map(str, shape))} = "
        f"{math.prod(shape)} bytes after the header, got {got}. Download the file again."
    )


def write_idx(path: Path, values: np.ndarray) -> None:
    """Writes unsigned bytes as a gzipped IDX file; equal values give identical files."""
    header = bytes([0, 0, UNSIGNED_BYTE, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    # Without time stamp and name in the gzip header, which would differ between runs.
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes(), compresslevel=9, mtime=0))
