"""Opens files of data sets, whose content may be damaged or hostile: regular files only, sizes before memory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torchmn.errors import DatasetError, TorchMNError

UNPACKED_PER_BYTE = 64
MOST_UNPACKED = 1 << 26
"""Bytes that a small file may unpack to; a larger file, to `UNPACKED_PER_BYTE` times its size."""
_SHOWN = 200  # characters of the message of another library


def expanded(path: str | os.PathLike[str]) -> Path:
    """Returns the path with ~ replaced by the home directory, unchanged for a user who has none."""
    return Path(os.path.expanduser(path))


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Raises a DatasetError that names the file for any error in its block: damaged files fail in any way.

    Args:
        path: of the file.
        kind: what was expected, with its article, such as "an .npz file".
    """
    try:
        yield
    except TorchMNError:
        raise
    except MemoryError as error:
        raise DatasetError(f"{path}: expected content that fits into memory. Pass a smaller file.") from error
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:  # not one of a library, about content
            raise DatasetError(f"{path}: cannot be read ({error.strerror}).") from error
        reason = f"{type(error).__name__}: {error}"[:_SHOWN]
        raise DatasetError(f"{path}: not {kind}, or a damaged one ({reason}). Get the file again.") from error


def open_regular(path: Path) -> BinaryIO:
    """Returns the opened file; raises an OSError for a directory, and for a pipe or device instead of waiting for it.

    A link to a regular file is one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            kind = "a directory" if os.path.isdir(path) else "a pipe or device"
            raise OSError(errno.EINVAL, f"expected a regular file, got {kind}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def size_of(file: BinaryIO) -> int:
    """Returns the size in bytes of a file from `open_regular`."""
    return os.fstat(file.fileno()).st_size


def read_regular(path: Path, most: int | None = None) -> bytes:
    """Returns the content of a regular file; raises a DatasetError if it has more than `most` bytes."""
    with open_regular(path) as file:
        size = size_of(file)
        if most is not None and size > most:
            raise DatasetError(f"{path}: expected at most {most} bytes, got {size}. Is this the right file?")
        check_fits(path, size)
        return file.read(size)


def check_fits(path: Path, size: int) -> None:
    """Raises a DatasetError if the memory of this machine is too small for `size` bytes that are read from a file."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise DatasetError(
            f"{path}: its content takes {size} bytes of memory, and this machine has {memory}. Pass a smaller file."
        )


def most_unpacked(size: int) -> int:
    """Returns how many bytes a file of `size` bytes may unpack to: deflated zeros have 1,000 times their size."""
    return max(MOST_UNPACKED, size * UNPACKED_PER_BYTE)


def entries_of(folder: Path) -> list[Path]:
    """Returns the paths in a folder, sorted by name; raises a DatasetError if it cannot be listed."""
    with reading(folder, "a folder"):
        return sorted(folder.iterdir())
