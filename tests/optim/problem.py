"""A small regression problem whose one-process training every distributed run must reproduce."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchmn import Communicator

BATCH = 12
STEPS = 20

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def make_model(seed: int = 0) -> nn.Sequential:
    """An MLP in float64, made without the global random state."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return model


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return x, torch.sin(x[:, :2] * 2)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def serial_run(name: str, steps: int = STEPS) -> tuple[list[float], list[Tensor]]:
    """Losses and final parameters of one process on the whole batches."""
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def uneven(comm: Communicator, size: int = BATCH) -> slice:
    """This rank's samples, of which the last rank has the rest: 1, 1, ..., size - ranks + 1."""
    return slice(comm.rank, comm.rank + 1 if comm.rank < comm.size - 1 else size)


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
