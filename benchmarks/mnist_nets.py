"""The networks and optimizers of data_parallel.py, and one step of an ordinary training loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10)
    )


def convnet() -> nn.Module:
    """The model of PyTorch's MNIST example, whose batch size is 64."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10)),
    )


def convnet_20_50() -> nn.Module:
    """The model of examples/mnist-cnn.yaml."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


def convnet_10_20() -> nn.Module:
    """The model of Horovod's MNIST example."""
    return nn.Sequential(
        *(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10)),
    )


def lenet5() -> nn.Module:
    """LeNet-5 with ReLU and max-pooling: 61,706 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # the model, samples per rank, steps per turn
    "MLP 784-1000-1000-10": (mlp, 100, 10),
    "conv 32-64, fc 128": (convnet, 64, 3),
    "conv 20-50, fc 500": (convnet_20_50, 64, 8),
    "conv 10-20, fc 50": (convnet_10_20, 64, 10),
    "LeNet-5": (lenet5, 64, 10),
}


def batch_of(name: str) -> tuple[Tensor, Tensor]:
    """Random images and labels for that model, the batch of one rank."""
    batch = MODELS[name][1]
    return torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))


def training(
    model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, before_step: Callable[[], object] | None = None
) -> Callable[[], None]:
    """One step of an ordinary training loop; `before_step` is called before the optimizer's step."""

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if before_step is not None:
            before_step()
        optimizer.step()

    return step


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adam": lambda model: torch.optim.Adam(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
}
