"""A model of many small tensors, and one step of its training; growth_optimizer.py and its baselines use it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

ELEMENTS = 64
NUMBERS = (10, 100, 1000, 5000)


class ManyTensors(nn.Module):
    """`count` tensors of 64 elements, whose dot product with the input is the loss."""

    def __init__(self, count: int):
        super().__init__()
        self.tensors = nn.ParameterList([torch.randn(ELEMENTS) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.tensors)).dot(x)


def optimizer_of(model: nn.Module) -> Optimizer:
    """The same update for all contenders: torch's default on a CPU is a loop that takes longer than communication."""
    return SGD(model.parameters(), lr=1e-6, foreach=True)


def training(model: nn.Module, optimizer: Optimizer, before_step: Callable[[], object] | None = None) -> Callable:
    """The function that runs one step."""
    x = torch.rand(ELEMENTS * len(list(model.parameters())))

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        if before_step is not None:
            before_step()
        optimizer.step()

    return step
