"""Random numbers of a step (the masks of dropout) follow from seed and step: the same on any ranks, also resumed."""

from __future__ import annotations

import torch

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.digests import number_of


def begin_step(comm: Communicator, seed: int, step: int) -> None:
    """Let torch's generator begin where it begins in this step on every number of ranks.

    A parallel model draws the numbers of the whole batch on every rank, and takes its part. Ranks that are threads
    share one generator: there rank 0 alone draws, and so rank 0 alone sets it.
    """
    if comm.rank == 0 or not comm.traits.shares_process:
        torch.manual_seed(seed_of(seed, step))


def seed_of(seed: int, what: object) -> int:
    """Where the random numbers of `what` begin, in an experiment with this seed."""
    return number_of(f"{seed}/{what}")
