"""Ranks that compare what they were asked to do, before they do it together."""

from __future__ import annotations

from typing import Any

from torchmn.communicators.base import Communicator


def meet(
    comm: Communicator,
    operation: str,
    problem: str | None = None,
    agreed: dict[str, Any] | None = None,
    may_differ: Any = None,
) -> list[Any]:
    """Each rank's `may_differ`; raises on every rank if one has a `problem` or if they do not say the same `agreed`.

    The watchdog counts only the time in here as waiting, not the time in a user's data set or loader.
    """
    return comm.agree(operation, problem, differ=may_differ, **(agreed or {}))
