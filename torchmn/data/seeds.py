"""Seeds that all ranks share."""

from __future__ import annotations

import torch

from torchmn.communicators.communicator import Communicator


def drawn_seed(comm: Communicator, root: int = 0) -> int:
    """A new seed at every call, the same on all ranks: the next number of root's torch generator.

    So `torch.manual_seed` makes a run repeatable. Every rank draws a number from its generator: those that were equal
    stay equal. Ranks that are threads share one, from which root alone draws.
    """
    seed = None
    if comm.rank == root or not comm.traits.shares_process:
        seed = int(torch.randint(1 << 62, (), generator=torch.random.default_generator, device="cpu"))
    return comm.bcast_obj(seed if comm.rank == root else None, root)
