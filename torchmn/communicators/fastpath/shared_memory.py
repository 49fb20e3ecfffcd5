"""Shared memory of the ranks of a host: one file per rank, mapped by all ranks and then unlinked."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from uuid import uuid4

from mpi4py import MPI

from torchmn.communicators.transports.mpi import allgather_plain
from torchmn.communicators.watchdog import observer_process


def share(comm: MPI.Comm, nbytes: int) -> dict[int, mmap.mmap]:
    """Returns `nbytes` of zeros for each rank of `comm`, by rank, mapped by all ranks; {} on all ranks if it fails.

    Collective. The memory is freed when no process maps it any more.
    """
    path = _new_file(nbytes)
    paths = allgather_plain(comm, path)
    maps: dict[int, mmap.mmap] = {}
    try:
        if all(paths):
            maps = {rank: _map(each, nbytes) for rank, each in enumerate(paths) if each}
    except OSError:  # containers with the same host name, but without a common /dev/shm
        maps = {}
    complete = all(allgather_plain(comm, len(maps) == comm.size))
    if path is not None:
        with suppress(OSError):  # the observer of this rank was first, because another rank has ended
            os.unlink(path)
    return maps if complete else {}


def _new_file(nbytes: int) -> str | None:
    """Returns the path of a new file in /dev/shm with its memory reserved; None if there is no room."""
    path = f"{observer_process.OWN_FILE}{os.getpid()}-{uuid4().hex}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        # Without reservation, a write to a page beyond the size of /dev/shm (64 MB in many containers) would kill the
        # process.
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
