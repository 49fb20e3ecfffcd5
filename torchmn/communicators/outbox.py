"""Shared memory between the ranks of a host: a sender copies a tensor into its outbox, the receiver copies it out.

`send` must not wait and its caller may change the tensor at once, so one copy has to be made anyway; made here, it is
the transfer. MPI would make another one or two.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from uuid import uuid4

from mpi4py import MPI

SLOT_BYTES = 4 << 20
SLOTS = 2
_PAGE = 4096  # the first page holds one byte per slot: 0 free, 1 full
_BYTES = _PAGE + SLOTS * SLOT_BYTES


class Outbox:
    """This rank's slots, and those of the other ranks on its host, by their rank in the world."""

    def __init__(self, world: MPI.Comm):
        self._lock = threading.Lock()
        self._rank = world.rank
        self._maps: dict[int, mmap.mmap] = {}
        host = world.Split_type(MPI.COMM_TYPE_SHARED)
        path = _new_file() if host.size > 1 else None
        paths = host.allgather((world.rank, path))
        try:
            if all(path for _, path in paths):
                self._maps = {rank: _map(path) for rank, path in paths}
        except OSError:  # containers that share a host name, but not /dev/shm
            self._maps = {}
        if not host.allreduce(bool(self._maps), MPI.LAND):
            self._maps = {}
        if path is not None:
            os.unlink(path)  # the memory lives as long as somebody maps it, and no longer
        host.Free()
        self._addresses = {rank: ctypes.addressof(ctypes.c_char.from_buffer(m)) for rank, m in self._maps.items()}

    def reaches(self, rank: int) -> bool:
        """Whether that rank of the world can read this outbox."""
        return rank in self._addresses

    def put(self, address: int, nbytes: int) -> int | None:
        """Copy memory into a free slot; None if all are full."""
        mine = self._addresses[self._rank]
        with self._lock:
            for slot in range(SLOTS):
                if self.is_free(slot):
                    ctypes.c_uint8.from_address(mine + slot).value = 1
                    break
            else:
                return None
        ctypes.memmove(mine + _PAGE + slot * SLOT_BYTES, address, nbytes)
        return slot

    def is_free(self, slot: int) -> bool:
        """Whether the receiver has taken what was in the slot."""
        return ctypes.c_uint8.from_address(self._addresses[self._rank] + slot).value == 0

    def take(self, source: int, slot: int, address: int, nbytes: int) -> None:
        """Copy what `source`, a rank of the world, has put into its slot, and free it."""
        theirs = self._addresses[source]
        ctypes.memmove(address, theirs + _PAGE + slot * SLOT_BYTES, nbytes)
        ctypes.c_uint8.from_address(theirs + slot).value = 0


def _new_file() -> str | None:
    """A file of shared memory, filled with zeros, that really has its room; None where there is none."""
    path = f"/dev/shm/torchmn-{uuid4().hex}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        # A write to a page that /dev/shm (64 MB in many containers) has no room for would kill the process.
        os.posix_fallocate(file, 0, _BYTES)
    except (OSError, AttributeError):
        os.unlink(path)
        return None
    finally:
        os.close(file)
    return path


def _map(path: str) -> mmap.mmap:
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, _BYTES)
    finally:
        os.close(file)
