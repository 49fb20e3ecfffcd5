"""Networks with their mode set, under the names that users of neon's MPI code know.

Each is an ordinary model and one call of `parallelize`: write that yourself as soon as you change the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.models.configurations import MNIST, Configuration
from torchmn.models.sparse_autoencoder import SparseAutoencoder
from torchmn.parallel import parallelize

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
