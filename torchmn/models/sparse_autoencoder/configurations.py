"""Ready-made models: the published configurations of the sparse autoencoder, and the models of neon's MPI examples.

`MNIST` and `CIFAR10` are sizes and training schedules of the sparse autoencoder. `ConvnetDist`, `GBDist` and `MLPDist`
build a model and make it parallel, under the names that neon used; `convnet` and `mlp` are the plain models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from torch import nn

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.models.sparse_autoencoder.fine_tuning import Momentum, fine_tune
from torchmn.models.sparse_autoencoder.model import SparseAutoencoder
from torchmn.models.sparse_autoencoder.pretraining import pretrain
from torchmn.parallel import parallelize

Grid = ProcessGrid | Communicator


@dataclass(frozen=True)
class Configuration:
    """Sizes of a sparse autoencoder, and the schedule that trains it.

        model = MNIST.model()
        batches = LabelledBatches(train.images, train.labels, MNIST.batch_size)
        MNIST.pretrain(model, batches)
        MNIST.fine_tune(model, batches)

    Keyword arguments of the methods override the configured values.

    Attributes:
        in_maps, in_size, maps, kernel, pool, norm, classes, sparsity: arguments of `SparseAutoencoder`.
        batch_size: samples in a batch.
        pretrain_epochs, pretrain_learning_rate: arguments of `pretrain`.
        initial_epochs, epochs, learning_rate, momentum: arguments of `fine_tune`.
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
        """Returns a new network with random filters."""
        names = "in_maps", "in_size", "maps", "kernel", "pool", "norm", "classes", "sparsity"
        return SparseAutoencoder(len(self.kernel), **{name: getattr(self, name) for name in names} | changes)

    def pretrain(self, model: SparseAutoencoder, batches: Any, **changes: Any) -> Any:
        """Calls `pretrain` with this schedule, and returns its result."""
        schedule = {"epochs": self.pretrain_epochs, "learning_rate": self.pretrain_learning_rate}
        return pretrain(model, batches, **schedule | changes)

    def fine_tune(self, model: SparseAutoencoder, batches: Any, **changes: Any) -> list[float]:
        """Calls `fine_tune` with this schedule, and returns its result."""
        names = "epochs", "initial_epochs", "learning_rate", "momentum"
        return fine_tune(model, batches, **{name: getattr(self, name) for name in names} | changes)


MNIST = Configuration()


CIFAR10 = Configuration(in_maps=3, in_size=(32, 32), pretrain_epochs=1, pretrain_learning_rate=0.001)


def convnet(
    in_shape: tuple[int, int, int] = (1, 28, 28),
    maps: Sequence[int] = (20, 50),
    kernel: int = 5,
    hidden: Sequence[int] = (500,),
    classes: int = 10,
) -> nn.Sequential:
    """Returns a network of [convolution → 2 x 2 max pooling] for each of `maps`, then Linears with ReLU in between.

    The default is the MNIST network 20-50-500-10.

    Args:
        in_shape: (channels, height, width) of an image.
        maps: output channels of the convolutions.
        kernel: of the convolutions.
        hidden: sizes of the hidden Linears.
        classes: number of outputs.

    Returns:
        The network, on one rank.
    """
    layers: list[nn.Module] = []
    channels, height, width = in_shape
    for number in maps:
        layers += [nn.Conv2d(channels, number, kernel), nn.MaxPool2d(2)]
        channels, height, width = number, (height - kernel + 1) // 2, (width - kernel + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), *_linears([channels * height * width, *hidden, classes]))


def mlp(sizes: Sequence[int] = (784, 2000, 10)) -> nn.Sequential:
    """Returns a network of Linears from each of `sizes` to the next, with ReLU in between. Images are flattened."""
    return nn.Sequential(nn.Flatten(), *_linears(sizes))


def ConvnetDist(  # noqa: N802  (neon's name)
    grid: Grid, mode: str = "halopar", *, in_shape: tuple[int, int, int] = (1, 28, 28), **sizes: Any
) -> nn.Module:
    """Returns `convnet(in_shape, **sizes)` made parallel. All ranks must call it.

    Args:
        grid: see `torchmn.parallelize`.
        mode: see `torchmn.parallelize`.
        in_shape: (channels, height, width) of an image.
        sizes: further arguments of `convnet`.

    Returns:
        The parallel model.
    """
    return parallelize(convnet(in_shape, **sizes), grid, mode, input_shape=in_shape)


def GBDist(  # noqa: N802
    grid: Grid, mode: str = "halopar", *, configuration: Configuration = MNIST, **changes: Any
) -> SparseAutoencoder:
    """Returns `configuration.model(**changes)`, a SparseAutoencoder, made parallel. All ranks must call it.

    Each rank holds the filters of its tile. `configuration.pretrain` and `configuration.fine_tune` train it as on one
    rank.

    Args:
        grid: see `torchmn.parallelize`.
        mode: see `torchmn.parallelize`.
        configuration: sizes of the model.
        changes: arguments of `SparseAutoencoder` that override the configuration.

    Returns:
        The parallel model.
    """
    model = configuration.model(**changes)
    return cast(SparseAutoencoder, parallelize(model, grid, mode, input_shape=model.in_shape))  # keeps the class


def MLPDist(grid: Grid, mode: str = "vecpar", *, sizes: Sequence[int] = (784, 2000, 10)) -> nn.Module:  # noqa: N802
    """Returns `mlp(sizes)` made parallel: vectors and weights are cut over ranks. All ranks must call it.

    Args:
        grid: see `torchmn.parallelize`.
        mode: see `torchmn.parallelize`.
        sizes: of the vectors, from the input to the output.

    Returns:
        The parallel model.
    """
    return parallelize(mlp(sizes), grid, mode)


def _linears(sizes: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]
