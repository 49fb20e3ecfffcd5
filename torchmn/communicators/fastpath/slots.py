"""Messages between the ranks of a host in shared memory: the sender copies a tensor into one of its slots.

`send` must not wait, and its caller may change the tensor afterwards, so one copy is necessary; here that copy is the
transfer, where MPI would make one or two more. The receiver copies the tensor out while the sender still fills the
slot: a counter in the slot holds the number of bytes written.
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
# The first page has a counter per slot, each in its own cache line: 0 if the slot is free, else 1 + the bytes written.
_PAGE, _LINE = 4096, 64
_BYTES = _PAGE + SLOTS * SLOT_BYTES
# Other processors may make the counter visible before the bytes that it counts: there, a slot is filled completely
# first.
FILLS_WHILE_READ = platform.machine() in ("x86_64", "AMD64")
STEP_BYTES = 128 << 10 if FILLS_WHILE_READ else SLOT_BYTES
_SPINS = 200

_Slot = tuple[ctypes.c_uint64, int]  # its counter, and the address of its memory


class Slots:
    """This rank's slots, and those of the other ranks on its host, by world rank."""

    def __init__(self, world: MPI.Comm, hosts: Sequence[str]):
        self._lock = threading.Lock()
        # By host name: Split_type makes MPICH reserve 2 MB per rank for unexpected messages.
        host = world.Split(hosts.index(hosts[world.rank]), world.rank)
        self._maps = share(host, _BYTES) if host.size > 1 else {}
        ranks = host.group.Translate_ranks(list(range(host.size)), world.group)
        host.Free()
        self._slots = {
            ranks[local]: _slots_at(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
            for local, memory in self._maps.items()
        }
        self._own = self._slots.get(world.rank, [])

    def reaches(self, rank: int) -> bool:
        """Returns whether that world rank can read this rank's slots."""
        return rank in self._slots

    def claim(self) -> int | None:
        """Returns a free slot and marks it as used; None if all are in use."""
        with self._lock:
            for slot, (filled, _) in enumerate(self._own):
                if filled.value == 0:
                    filled.value = 1
                    return slot
        return None

    def fill(self, slot: int, address: int, nbytes: int, first: int = 0) -> None:
        """Copies memory, from byte `first` on, into a claimed slot. The receiver may read it meanwhile."""
        filled, memory = self._own[slot]
        for start in range(first, nbytes, STEP_BYTES):
            end = min(start + STEP_BYTES, nbytes)
            ctypes.memmove(memory + start, address + start, end - start)
            filled.value = 1 + end

    def is_delivered(self, slot: int) -> bool:
        """Returns whether the content of the slot was received."""
        return self._own[slot][0].value == 0

    def copy_out(self, source: int, slot: int, x: Tensor) -> None:
        """Copies the content of a slot of world rank `source` into contiguous `x`, and frees the slot."""
        filled, memory = self._slots[source][slot]
        address, nbytes, copied = x.data_ptr(), x.nbytes, 0
        while copied < nbytes:
            end = _wait_for_more(copied, filled)
            ctypes.memmove(address + copied, memory + copied, end - copied)
            copied = end
        filled.value = 0


def _wait_for_more(copied: int, filled: ctypes.c_uint64) -> int:
    """Returns the number of bytes in a slot, when it exceeds `copied`."""
    spins = 0
    while (end := filled.value - 1) <= copied:
        spins += 1
        if spins > _SPINS:  # the sender may need this core
            os.sched_yield()
    return end


def _slots_at(address: int) -> list[_Slot]:
    """Returns the slots of the shared memory at this address."""
    return [
        (ctypes.c_uint64.from_address(address + slot * _LINE), address + _PAGE + slot * SLOT_BYTES)
        for slot in range(SLOTS)
    ]
