"""The two stages of pipeline.py, and what every pipeline of them must compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

MICROBATCHES = (1, 2, 4, 8)
# So many rows that a part of an eighth of them is multiplied as efficiently as all of them: with fewer, micro-batches
# cost more than their share of the batch in any schedule (RESULTS.md has it measured without messages).
BATCH, WIDTH, LAYERS = 4096, 384, 4


def stage() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def batch() -> tuple[Tensor, Tensor]:
    """The pipeline's input and its target."""
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def checked(step: Callable[[], None], module: nn.Module, rank: int) -> Callable[[], None]:
    """`step`, once it has given the stage of that rank the gradients that one process would have."""
    step()
    whole = nn.Sequential(stage(), stage())
    x, target = batch()
    mse_loss(whole(x), target).backward()
    for mine, reference in zip(module.parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-3, atol=1e-7)
    return step
