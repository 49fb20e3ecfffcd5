"""Do all ranks say the same? Every collective operation asks before it sends anything, in one tiny message."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchmn.communicators import checks, ownership
from torchmn.communicators.watchdog import Wait
from torchmn.errors import ArgumentError, TorchMNError

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator


class Agreement:
    """The part of a communicator that compares what ranks are about to do."""

    def _meet(
        self: Communicator,  # type: ignore[misc]
        operation: str,
        problem: str | None,
        names: tuple[str, ...] = (),
        values: Any = (),
        may_differ: Any = None,
        carried: Tensor | None = None,
    ) -> list[Any] | None:
        """Compare this call with the other ranks' and raise on all of them if it can not work.

        Returns None if all ranks said exactly the same; otherwise each rank's `may_differ`. A contiguous tensor of at
        most `carried_bytes` goes to all ranks along with the comparison: see `_carried_parts`.
        """
        wait = self._watch.waits.get(get_ident())
        if wait is None or wait.communicator is not self:  # the watchdog must see whoever comes without a note
            with Wait(self, operation):
                return self._meet(operation, problem, names, values, may_differ, carried)
        if self._closed:
            self._check_open(operation)
        if self._edges.unneeded:
            self._edges.say_unneeded(self)
        self._collectives += 1
        if problem and (self.size == 1 or not self.settings.checks):
            raise ArgumentError(f"rank {self.rank} of {self.size}: {operation}: {problem}")
        aside = self._aside
        must_meet = may_differ is not None or self.settings.checks or (aside is not None and aside.wish)
        if self.size == 1 or not must_meet:
            return None
        # A wrong argument gets a number that no other rank has, so that the comparison fails on all.
        number = -1 - self.rank if problem else checks.fingerprint((operation, values, may_differ))
        if aside is not None and not problem:
            number = aside.mixed_into(number)
        if self._same_everywhere(number) if carried is None else self._same_everywhere_carrying(number, carried):
            return None
        return self._compare_statements(operation, problem, names, values, may_differ)

    def _compare_statements(
        self: Communicator,  # type: ignore[misc]
        operation: str,
        problem: str | None,
        names: tuple[str, ...],
        values: Any,
        may_differ: Any,
    ) -> list[Any]:
        """Each rank's `may_differ`, if nothing else differs between the ranks; otherwise raise on all of them."""
        said = {} if problem else dict(zip(names, values, strict=True))
        statements = self._allgather_pickled(checks.state_here(operation, said, may_differ, problem, self._aside))
        checks.raise_disagreement(statements, self.rank)
        self._wishes = [statement.wish for statement in statements]
        return [statement.may_differ for statement in statements]

    def _claim(self: Communicator, operation: str) -> None:  # type: ignore[misc]
        ownership.claim(self, operation)

    def _check_open(self: Communicator, operation: str) -> None:  # type: ignore[misc]
        if self._closed:
            raise TorchMNError(f"rank {self.rank} of {self.size}: {operation} {self.closed_because}")
