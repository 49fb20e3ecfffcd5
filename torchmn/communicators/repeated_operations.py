"""RepeatedOperations: ranks compare the operations of a computation that they repeat the first time only.

A forward of a parallel model has as many operations as layers that communicate, and they are the same in each forward.
So each rank records what was compared in one forward. Before the next one, ranks compare a number for the record. Then
each rank compares its operations with its own record: an operation that is not the recorded one is compared between
ranks again, and so is every later one of this forward.

Ranks must leave the record at the same operation. If only one does, such as by a random number of its own, it waits for
a comparison while the others wait for its message, and the watchdog reports where each rank is.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torchmn.communicators.arguments import fingerprint
from torchmn.context import here


class RepeatedOperations:
    """The operations of one computation, which is a context: `is_repeated` then refers to it.

    Args:
        inner: the communicator whose ranks compare `number`.

    Attributes:
        known: whether all ranks that take part have equal records; set before the computation.
        number: identifies the recorded operations; 0 if there is no record.
        outer_number: identifies those of other communicators than `inner`, whose ranks may have other records of it.
    """

    def __init__(self, inner: Any):
        self._inner = inner
        self._record: list[tuple[bool, Hashable]] = []
        self._next = 0
        self._is_new = True
        self.known = False
        self.number = self.outer_number = 0

    def __enter__(self) -> RepeatedOperations:
        self._outer, here.operations = here.operations, self
        self._next = 0
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        here.operations, self._outer = self._outer, None
        if kind is not None:  # other ranks may have got further
            self._record, self._is_new = [], True
            self.number = self.outer_number = 0
        elif self._is_new or self._next < len(self._record):
            del self._record[self._next :]
            self._is_new = False
            self.number = fingerprint(("operations", tuple(self._record)))
            self.outer_number = fingerprint(("operations", tuple([key for inner, key in self._record if not inner])))

    def repeats(self, comm: Any, key: Hashable) -> bool:
        """Returns whether the next operation is the recorded one; otherwise records it."""
        operation, at = (comm is self._inner, key), self._next
        self._next += 1
        if at < len(self._record) and self._record[at] == operation:
            return self.known
        del self._record[at:]
        self._record.append(operation)
        self._is_new, self.known = True, False
        return False


def is_repeated(comm: Any, key: Hashable) -> bool:
    """Returns whether all ranks of `comm` know that this operation comes now, so that they need not compare it.

    Args:
        comm: communicator of the operation.
        key: all that must be equal on its ranks.
    """
    operations: RepeatedOperations | None = here.operations
    return operations is not None and operations.repeats(comm, key)
