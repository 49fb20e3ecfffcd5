"""Ranks that compare what they were asked to do, before they do it together."""

from __future__ import annotations

from typing import Any

import torch

from torchmn.communicators.base import Communicator
from torchmn.communicators.watchdog import Wait


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
    agreed = agreed or {}
    with Wait(comm, operation):
        told = comm._meet(operation, problem, tuple(agreed), tuple(agreed.values()), may_differ)
    return [may_differ] * comm.size if told is None else told


def drawn_seed(comm: Communicator, root: int = 0) -> int:
    """A new seed at every call, the same on all ranks: the next number of root's torch generator.

    So `torch.manual_seed` makes a run repeatable. Every rank draws a number from its generator: those that were equal
    stay equal. Ranks that are threads share one, from which root alone draws.
    """
    seed = None
    if comm.rank == root or not comm.ranks_share_a_process:
        seed = int(torch.randint(1 << 62, (), generator=torch.random.default_generator, device="cpu"))
    return comm.bcast_obj(seed if comm.rank == root else None, root)
