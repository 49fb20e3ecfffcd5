"""Shared memory between the ranks of a host: a sender copies a tensor into its outbox, the receiver copies it out.

`send` must not wait and its caller may change the tensor at once, so one copy has to be made anyway; made here, it is
the transfer. MPI would make another one or two.
"""

from __future__ import annotations

import ctypes
import threading

from mpi4py import MPI

from torchmn.communicators.shared_memory import share

SLOT_BYTES = 4 << 20
SLOTS = 2
_PAGE = 4096  # the first page holds one byte per slot: 0 free, 1 full
_BYTES = _PAGE + SLOTS * SLOT_BYTES


class Outbox:
    """This rank's slots, and those of the other ranks on its host, by their rank in the world."""

    def __init__(self, world: MPI.Comm):
        self._lock = threading.Lock()
        self._rank = world.rank
        host = world.Split_type(MPI.COMM_TYPE_SHARED)
        self._maps = share(host, _BYTES) if host.size > 1 else {}
        ranks = host.group.Translate_ranks(list(range(host.size)), world.group)
        host.Free()
        self._addresses = {
            ranks[local]: ctypes.addressof(ctypes.c_char.from_buffer(memory)) for local, memory in self._maps.items()
        }

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
