"""Memory that all ranks of a host can read and write: one file per rank, mapped by all, with no name left behind."""

from __future__ import annotations

import mmap
import os
from uuid import uuid4

from mpi4py import MPI

from torchmn.communicators.transports.mpi import allgather_plain


def share(comm: MPI.Comm, nbytes: int) -> dict[int, mmap.mmap]:
    """`nbytes` of zeros for each rank of `comm`, by rank, mapped by every one; {} on all ranks if that can not be.

    Every rank must call it. The memory lives as long as a process maps it, and no longer.
    """
    path = _new_file(nbytes)
    paths = allgather_plain(comm, path)
    maps: dict[int, mmap.mmap] = {}
    try:
        if all(paths):
            maps = {rank: _map(theirs, nbytes) for rank, theirs in enumerate(paths) if theirs}
    except OSError:  # another host, or containers that share a host name but not /dev/shm
        maps = {}
    complete = all(allgather_plain(comm, len(maps) == comm.size))
    if path is not None:
        os.unlink(path)
    return maps if complete else {}


def _new_file(nbytes: int) -> str | None:
    """A file of shared memory that really has its room; None where there is none."""
    path = f"/dev/shm/torchmn-{uuid4().hex}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        # A write to a page that /dev/shm (64 MB in many containers) has no room for would kill the process.
        os.posix_fallocate(file, 0, nbytes)
    except (OSError, AttributeError):
        os.unlink(path)
        return None
    finally:
        os.close(file)
    return path


def _map(path: str, nbytes: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)
