"""Atomic creation and removal of checkpoint directories: files are synced to disk before the directory is renamed."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

MANIFEST = "manifest.json"
TENSORS = ".safetensors"
MESSAGE = ".message"
"""Ending of files by which ranks communicate while they write a checkpoint."""


def write_durably(path: Path, data: bytes) -> None:
    """Writes a new file, and returns once it is on disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def own_file(directory: Path, file: str) -> Path:
    """Returns the path of a regular file in `directory`; raises OSError for a pipe, or a link out of the directory.

    Checkpoints may come from untrusted sources: a link could point to any file of this user, and reading a pipe may
    block forever. `directory` itself may be a link.
    """
    path = directory / file
    if path.resolve(strict=True).parent != directory.resolve():
        raise OSError(f"{file} is a link to a file outside of its checkpoint: copy the file (cp -L)")
    if not path.is_file():
        raise OSError(f"{file} is not a regular file")
    return path


def sync(path: Path) -> None:
    """Returns once the content of this file, or the names in this directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not support syncing directories
            raise
    finally:
        os.close(descriptor)


def publish(partial: Path, final: Path) -> None:
    """Renames a directory whose files are on disk, atomically, to its final name."""
    sync(partial)
    os.rename(partial, final)
    sync(final.parent)


def remove_messages(directory: Path) -> None:
    """Removes the files by which ranks have communicated."""
    for file in os.listdir(directory):
        if file.endswith(MESSAGE):
            os.unlink(directory / file)


def remove(directory: Path) -> None:
    """Removes a checkpoint: first its manifest, then the other files of a checkpoint, then the directory if empty.

    If the process is killed meanwhile, the directory has no manifest, and the next removal completes it. Of a link to a
    checkpoint, only the link is removed.
    """
    if directory.is_symlink():
        os.unlink(directory)
        return
    not_a_checkpoint = suppress(FileNotFoundError, NotADirectoryError)
    with not_a_checkpoint:
        os.unlink(directory / MANIFEST)
    with not_a_checkpoint:
        for file in sorted(os.listdir(directory)):
            if file.endswith((TENSORS, MESSAGE)):
                os.unlink(directory / file)
    with suppress(OSError):  # not empty: it contains other files
        os.rmdir(directory)
