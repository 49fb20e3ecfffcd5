"""One rank decides, all ranks know: how observations of several ranks become one value that no two see differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmn.communicators.communicator import Communicator


def decided_on_rank_0(
    comm: Communicator, operation: str, local: Any, decide: Callable[[list[Any]], Any], problem: str | None = None
) -> Any:
    """What `decide` makes of all ranks' `local`, computed once, on rank 0, and sent to all.

    Computing it on every rank could give answers that differ in the last digit, and ranks that part ways. What
    `decide` raises on rank 0 is an `ArgumentError` on every rank, and so is a `problem` with this rank's `local`.
    """
    comm.agree(operation, problem)
    everyone = comm.gather_obj(local, 0)
    return comm.attempt(operation, lambda: decide(everyone or []), root=0)[0]
