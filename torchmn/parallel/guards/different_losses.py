"""Guard: losses that differ between ranks that share images."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.errors import MismatchError
from torchmn.parallel.events import OutputEvent, guard
from torchmn.trees import leaves_of

_LOSSES = 4  # that are compared: ranks that shuffle differently do so from the first batch on


@guard(
    on="output",
    why="ranks that shuffle differently have tiles of different images, or different labels, without any error",
)
def different_losses(seen: OutputEvent) -> None:
    """Registers hooks by which backward compares the gradients of the first outputs in training."""
    parallelism = seen.parallelism
    tiles, counts = parallelism.grid.tiles, parallelism.guard_counts
    if (
        tiles.size == 1
        or parallelism.output != "whole"
        or not seen.model.training
        or counts["different_losses"] >= _LOSSES
    ):
        return
    # Not parameters that the model returns: their gradients are this rank's contributions.
    outputs = [x for x in leaves_of(Tensor, seen.result) if x.grad_fn is not None]
    if outputs:
        counts["different_losses"] += 1
        for x in outputs:
            x.register_hook(_CompareGradients(tiles))


class _CompareGradients:
    """A hook on a whole output that raises a MismatchError on every rank if its gradient differs between ranks.

    The output is the same on all ranks that share images, and so is its gradient, unless losses or labels differ.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm

    @uncompiled
    def __call__(self, gradient: Tensor) -> None:
        values = gradient.detach().flatten().double().cpu()
        # Two numbers that rounding changes little, and another order of the samples a lot.
        weighted = values @ torch.arange(1, len(values) + 1, dtype=torch.float64).cos()
        fingerprint = (weighted.item(), values.norm().item())
        by_rank = self.comm.agree("backward of a parallel model", differ=fingerprint, optional=True)
        numbers = torch.tensor(by_rank, dtype=torch.float64)
        spread = (numbers.amax(0) - numbers.amin(0)).max()
        if spread > 1e-3 * numbers[:, 1].max():  # False for NaN, which all ranks may have
            comm = self.comm
            raise MismatchError(
                f"rank {comm.rank} of {comm.size}: backward of a parallel model: the ranks that share images have "
                "different gradients of the model's output, so their losses or their labels differ. All of them must "
                "have the same samples in the same order: with shuffle=True, pass a generator with the same seed to "
                "the DataLoader of every rank"
            )
