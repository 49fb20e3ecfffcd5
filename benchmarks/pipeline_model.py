"""The two stages of the pipeline benchmark, and the gradients that every pipeline of them must compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

MICROBATCHES = (1, 2, 4, 8)
# With so many rows, an eighth of them is multiplied as efficiently as all of them. With fewer, micro-batches cost more
# than their share of the batch in any schedule.
BATCH, WIDTH, LAYERS = 4096, 384, 4


def stage() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def batch() -> tuple[Tensor, Tensor]:
    """The pipeline's input and its target."""
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def checked(step: Callable[[], None], module: nn.Module, rank: int) -> Callable[[], None]:
    """`step`, after a check that it gives the rank's stage the gradients that one process computes."""
    step()
    whole = nn.Sequential(stage(), stage())
    x, target = batch()
    mse_loss(whole(x), target).backward()
    for parameter, reference in zip(module.parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-3, atol=1e-7)
    return step
