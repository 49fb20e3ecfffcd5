"""The published sizes and schedules of the sparse autoencoder, for MNIST and CIFAR-10."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.models.sparse_autoencoder.fine_tuning import Momentum, fine_tune
from torchmn.models.sparse_autoencoder.model import SparseAutoencoder
from torchmn.models.sparse_autoencoder.pretraining import pretrain
from torchmn.parallel import parallelize


@dataclass(frozen=True)
class Configuration:
    """A network and the schedule that trains it.

        model = MNIST.model()
        batches = LabelledBatches(train.images, train.labels, MNIST.batch_size)
        MNIST.pretrain(model, batches)
        MNIST.fine_tune(model, batches)

    Each method takes the arguments of the function it calls, in place of the configured ones.
    """

    in_maps: int = 1
    in_size: tuple[int, int] = (28, 28)
    maps: int = 8
    kernel: tuple[int, ...] = (4, 3, 3)
    pool: int = 3
    norm: int = 3
    classes: int = 10
    sparsity: float = 0.1
    batch_size: int = 100
    pretrain_epochs: int = 2
    pretrain_learning_rate: float = 0.01
    initial_epochs: int = 1
    epochs: int = 4
    learning_rate: float = 0.1
    momentum: Momentum = field(default_factory=Momentum)

    def model(self, **changes: Any) -> SparseAutoencoder:
        """A new network with random filters."""
        names = "in_maps", "in_size", "maps", "kernel", "pool", "norm", "classes", "sparsity"
        return SparseAutoencoder(len(self.kernel), **{name: getattr(self, name) for name in names} | changes)

    def pretrain(self, model: SparseAutoencoder, batches: Any, **changes: Any) -> Any:
        """`pretrain` with this schedule."""
        schedule = {"epochs": self.pretrain_epochs, "learning_rate": self.pretrain_learning_rate}
        return pretrain(model, batches, **schedule | changes)

    def fine_tune(self, model: SparseAutoencoder, batches: Any, **changes: Any) -> list[float]:
        """`fine_tune` with this schedule."""
        names = "epochs", "initial_epochs", "learning_rate", "momentum"
        return fine_tune(model, batches, **{name: getattr(self, name) for name in names} | changes)


MNIST = Configuration()
CIFAR10 = Configuration(in_maps=3, in_size=(32, 32), pretrain_epochs=1, pretrain_learning_rate=0.001)


Grid = ProcessGrid | Communicator


def convnet(
    in_shape: tuple[int, int, int] = (1, 28, 28),
    maps: Sequence[int] = (20, 50),
    kernel: int = 5,
    hidden: Sequence[int] = (500,),
    classes: int = 10,
) -> nn.Sequential:
    """[convolution → 2 x 2 max pooling] for each of `maps`, then Linears with ReLU between them.

    in_shape: (channels, height, width). The default is the MNIST network 20-50-500-10.
    """
    layers: list[nn.Module] = []
    channels, height, width = in_shape
    for number in maps:
        layers += [nn.Conv2d(channels, number, kernel), nn.MaxPool2d(2)]
        channels, height, width = number, (height - kernel + 1) // 2, (width - kernel + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), *_linears([channels * height * width, *hidden, classes]))


def mlp(sizes: Sequence[int] = (784, 2000, 10)) -> nn.Sequential:
    """Linears from each of `sizes` to the next, with ReLU between them; images are flattened."""
    return nn.Sequential(nn.Flatten(), *_linears(sizes))


def ConvnetDist(  # noqa: N802  (its users' name)
    grid: Grid, mode: str = "halopar", *, in_shape: tuple[int, int, int] = (1, 28, 28), **sizes: Any
) -> nn.Module:
    """`convnet(in_shape, **sizes)` on a grid of ranks: images in tiles, convolutions with halos. All ranks call it."""
    return parallelize(convnet(in_shape, **sizes), grid, mode, input_shape=in_shape)


def GBDist(  # noqa: N802
    grid: Grid, mode: str = "halopar", *, configuration: Configuration = MNIST, **changes: Any
) -> SparseAutoencoder:
    """`configuration.model(**changes)`, a SparseAutoencoder, on a grid of ranks: each rank its own filters.

    `configuration.pretrain` and `configuration.fine_tune` train it as on one rank. All ranks call it.
    """
    model = configuration.model(**changes)
    return parallelize(model, grid, mode, input_shape=model.in_shape)  # type: ignore[return-value]  (the class stays)


def MLPDist(grid: Grid, mode: str = "vecpar", *, sizes: Sequence[int] = (784, 2000, 10)) -> nn.Module:  # noqa: N802
    """`mlp(sizes)` on a grid of ranks: vectors and weights are cut over them. All ranks call it."""
    return parallelize(mlp(sizes), grid, mode)


def _linears(sizes: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]
