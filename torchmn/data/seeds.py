"""A random seed that is the same on all ranks."""

from __future__ import annotations

import torch

from torchmn.communicators.communicator import Communicator


def draw_seed(comm: Communicator, root: int = 0) -> int:
    """Returns a new seed, the same on all ranks: the next number of root's torch generator.

    With `torch.manual_seed`, a run is therefore repeatable. Every rank draws a number from its generator, so that
    generators in the same state stay in the same state; of ranks that are threads of one process, only root draws.
    """
    seed = None
    if comm.rank == root or not comm.traits.shares_process:
        seed = int(torch.randint(1 << 62, (), generator=torch.random.default_generator, device="cpu"))
    return comm.bcast_obj(seed if comm.rank == root else None, root)
