"""Files that are whole or not there: everything is on the disk before its directory gets its name."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

MANIFEST = "manifest.json"
_TENSORS = ".safetensors"


def write_durably(path: Path, data: bytes) -> None:
    """Write a file, and return once it is on the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def own_file(directory: Path, file: str) -> Path:
    """The path of a file that lies in `directory` itself; raises OSError for a link that leads elsewhere, or a pipe.

    Checkpoints are copied from others: a link in one could name any file of this user, and a pipe never ends. A link
    to the whole directory is its user's own.
    """
    path = directory / file
    if path.resolve(strict=True).parent != directory.resolve():
        raise OSError(f"{file} is a link that leads out of its checkpoint: copy the file there (cp -L)")
    if not path.is_file():
        raise OSError(f"{file} is no regular file")
    return path


def sync(path: Path) -> None:
    """Return once what was written to this file, or the names in this directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that can not sync directories
            raise
    finally:
        os.close(descriptor)


def publish(partial: Path, final: Path) -> None:
    """Give a directory whose files are on the disk its final name. At any moment it has the one or the other."""
    sync(partial)
    os.rename(partial, final)
    sync(final.parent)


def remove(directory: Path) -> None:
    """Remove a checkpoint: first what makes it one, then the rest. Files that are not ours stay.

    A kill in the middle leaves a directory without a manifest, which the next removal finishes. Of a checkpoint that
    somebody moved elsewhere and left a link to, only the link goes.
    """
    if directory.is_symlink():
        os.unlink(directory)
        return
    not_ours = suppress(FileNotFoundError, NotADirectoryError)
    with not_ours:
        os.unlink(directory / MANIFEST)
    with not_ours:
        for file in sorted(os.listdir(directory)):
            if file.endswith(_TENSORS):
                os.unlink(directory / file)
    with suppress(OSError):  # somebody's own file lies there
        os.rmdir(directory)
