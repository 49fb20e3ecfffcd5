"""One rank decides, all ranks know: how observations of several ranks become one value that no two see differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmn.communicators.base import Communicator
from torchmn.communicators.watchdog import Wait
from torchmn.errors import ArgumentError


def decided_on_rank_0(
    comm: Communicator, operation: str, local: Any, decide: Callable[[list[Any]], Any], problem: str | None = None
) -> Any:
    """What `decide` makes of all ranks' `local`, computed once, on rank 0, and sent to all.

    Computing it on every rank could give answers that differ in the last digit, and ranks that part ways. What
    `decide` raises on rank 0 is an `ArgumentError` on every rank, and so is a `problem` with this rank's `local`.
    """
    with Wait(comm, operation):
        comm._meet(operation, problem)
    everyone = comm.gather_obj(local, 0)
    answer, cause = None, None
    if everyone is not None:
        try:
            answer = decide(everyone)
        except Exception as error:  # the user's own function may raise anything; the others must hear of it
            cause = error
            problem = str(error) if isinstance(error, ArgumentError) else f"{type(error).__name__}: {error}"
    answer, problem = comm.bcast_obj((answer, problem), 0)
    if problem is not None:
        raise ArgumentError(f"rank {comm.rank} of {comm.size}: {operation}: {problem}") from cause
    return answer
