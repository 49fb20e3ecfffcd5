"""Messages in shared memory between the ranks of a host: a sender copies a tensor into one of its slots.

`send` must not wait and its caller may change the tensor at once, so one copy has to be made anyway; made here, it is
the transfer. MPI would make another one or two. The receiver copies it out, side by side with the sender, who says how
far it has come.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Sequence

from mpi4py import MPI
from torch import Tensor

from torchmn.communicators.fastpath.shared_memory import share

SLOT_BYTES = 4 << 20
SLOTS = 3
# The first page holds a number per slot, each in a cache line of its own: 0 if it is free, else 1 and the bytes so far.
_PAGE, _LINE = 4096, 64
_BYTES = _PAGE + SLOTS * SLOT_BYTES
# Other processors may show a number to the receiver before the bytes that it speaks of: there, a slot is filled first.
FILLS_WHILE_READ = platform.machine() in ("x86_64", "AMD64")
STEP_BYTES = 128 << 10 if FILLS_WHILE_READ else SLOT_BYTES
_SPINS = 200

_Slot = tuple[ctypes.c_uint64, int]  # its number, and where its room begins


class Slots:
    """This rank's slots, and those of the other ranks on its host, by their rank in the world."""

    def __init__(self, world: MPI.Comm, hosts: Sequence[str]):
        self._lock = threading.Lock()
        # By name, as everywhere here: Split_type makes a rank of MPICH set up 2 MB for messages that it did not expect.
        host = world.Split(hosts.index(hosts[world.rank]), world.rank)
        self._maps = share(host, _BYTES) if host.size > 1 else {}
        ranks = host.group.Translate_ranks(list(range(host.size)), world.group)
        host.Free()
        self._slots = {
            ranks[local]: _slots_at(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
            for local, memory in self._maps.items()
        }
        self._mine = self._slots.get(world.rank, [])

    def reaches(self, rank: int) -> bool:
        """Whether that rank of the world can read this outbox."""
        return rank in self._slots

    def claim(self) -> int | None:
        """A free slot, which now is not; None if all are full."""
        with self._lock:
            for slot, (filled, _) in enumerate(self._mine):
                if filled.value == 0:
                    filled.value = 1
                    return slot
        return None

    def fill(self, slot: int, address: int, nbytes: int, first: int = 0) -> None:
        """Copy memory from byte `first` on into a slot that was claimed; the receiver may be reading already."""
        filled, room = self._mine[slot]
        for start in range(first, nbytes, STEP_BYTES):
            end = min(start + STEP_BYTES, nbytes)
            ctypes.memmove(room + start, address + start, end - start)
            filled.value = 1 + end

    def is_delivered(self, slot: int) -> bool:
        """Whether the receiver has what was put into the slot."""
        return self._mine[slot][0].value == 0

    def copy_out(self, source: int, slot: int, x: Tensor) -> None:
        """Fill contiguous `x` with what `source`, a rank of the world, puts into a slot of its own, and free that."""
        filled, room = self._slots[source][slot]
        address, nbytes, taken = x.data_ptr(), x.nbytes, 0
        while taken < nbytes:
            end = _filled_beyond(taken, filled)
            ctypes.memmove(address + taken, room + taken, end - taken)
            taken = end
        filled.value = 0


def _filled_beyond(taken: int, filled: ctypes.c_uint64) -> int:
    """How many bytes there are in a slot, when they are more than `taken`."""
    spins = 0
    while (end := filled.value - 1) <= taken:
        spins += 1
        if spins > _SPINS:  # the sender may need this very core
            os.sched_yield()
    return end


def _slots_at(address: int) -> list[_Slot]:
    """The slots of the outbox that begins there."""
    return [
        (ctypes.c_uint64.from_address(address + slot * _LINE), address + _PAGE + slot * SLOT_BYTES)
        for slot in range(SLOTS)
    ]
