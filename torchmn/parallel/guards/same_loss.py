"""Losses that differ between ranks that share images."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.errors import MismatchError
from torchmn.parallel.events import Output, guard
from torchmn.trees import leaves_of

_LOSSES = 4  # so many are compared: ranks that shuffle differently do so from the first batch on


@guard(
    on="output",
    why="ranks that shuffle differently have tiles of different images, or other labels, which nothing else shows",
)
def same_loss(seen: Output) -> None:
    """Lets the first losses be compared in backward, while a mistake still costs nothing."""
    parallelism = seen.parallelism
    tiles, counts = parallelism.grid.tiles, parallelism.looks
    if tiles.size == 1 or parallelism.output != "whole" or not seen.model.training or counts["same_loss"] >= _LOSSES:
        return
    # Not a parameter that the model returns, whose gradient is a rank's own share.
    learning = [x for x in leaves_of(Tensor, seen.result) if x.grad_fn is not None]
    if learning:
        counts["same_loss"] += 1
        for x in learning:
            x.register_hook(_SameLoss(tiles))


class _SameLoss:
    """A hook on a whole output: an error on every rank if its gradient is another one on another rank.

    The output is the same on all ranks that share images, and so is its gradient, unless their labels differ: ranks
    that shuffle differently have tiles of different images, which nothing else would show.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm

    @uncompiled
    def __call__(self, gradient: Tensor) -> None:
        values = gradient.detach().flatten().double().cpu()
        # Two numbers stand for all: rounding changes them little, another order of the samples a lot.
        weighted = values @ torch.arange(1, len(values) + 1, dtype=torch.float64).cos()
        mine = (weighted.item(), values.norm().item())
        told = self.comm.agree("backward of a parallel model", differ=mine, optional=True)
        everyone = torch.tensor(told, dtype=torch.float64)
        spread = (everyone.amax(0) - everyone.amin(0)).max()
        if spread > 1e-3 * everyone[:, 1].max():  # never for NaN, which may come to all
            comm = self.comm
            raise MismatchError(
                f"rank {comm.rank} of {comm.size}: backward of a parallel model: the ranks that share images have "
                "different gradients of the model's output, so their losses or their labels differ. All of them must "
                "have the same samples in the same order: with shuffle=True give every rank's DataLoader a generator "
                "with the same seed"
            )
