"""An image that is cut over two ranks with `halopar`, and the whole image on one rank.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/halo.py

Four 3x3 convolutions with 16 channels and ReLU on a batch of two images, forward and backward.
  no exchange          each rank computes its half as a separate image: the same local work without halos
  one rank             the whole image on one rank with one thread, while the other rank sleeps
  one rank, 2 threads  the same with two threads
`exchange`: one halo exchange of a 3x3 convolution with 16 channels, forward only; `copy only` pads the tile instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from results import Results, arguments
from timing import WORLD, Times, alone, take_turns, two_ranks
from torch import Tensor, nn

import torchmn
from torchmn.geometry import Window, owned

# Many short turns at small sizes: 40 turns of 4 steps vary less between runs (standard deviation of the ratio to
# `no exchange`: 0.014) than 7 turns of 16 steps (0.060).
SMALL_STEPS, SMALL_FACTOR = 4, 2


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


def forward_backward(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward; the input needs no gradient, as in training."""
    ones: list[Tensor] = []

    def run() -> None:
        model.zero_grad()
        y = model(x)
        if not ones:
            ones.append(torch.ones_like(y))
        y.backward(ones[0])

    return run


def half(x: Tensor) -> Tensor:
    """This rank's rows of a batch of images."""
    rows = owned(x.shape[2], WORLD.size, WORLD.rank)
    return x[:, :, rows.start : rows.stop].contiguous()


def cut_model(comm: torchmn.Communicator, x: Tensor) -> nn.Module:
    """The convolutions on tiles of images of `x`'s size."""
    grid = torchmn.ProcessGrid(comm, height=comm.size)
    return torchmn.parallelize(convolutions(), grid, "halopar", input_shape=x.shape[1:], output="tile")


def compare(size: int, comm: torchmn.Communicator, options: argparse.Namespace) -> Times:
    x = torch.rand(2, 3, size, size)
    contenders = {
        "TorchMN": forward_backward(cut_model(comm, x), half(x)),
        "no exchange": forward_backward(convolutions(), half(x)),
        "one rank": alone(forward_backward(convolutions(), x)),
        "one rank, 2 threads": alone(forward_backward(convolutions(), x), threads=2),
    }
    steps, factor = (1, 1) if size >= 512 else (SMALL_STEPS, SMALL_FACTOR)
    return take_turns(contenders, options, steps, factor)


def compare_exchange(size: int, comm: torchmn.Communicator, options: argparse.Namespace) -> Times:
    grid = torchmn.ProcessGrid(comm, height=comm.size)
    image = torchmn.GlobalArray(grid, (size, size), Window(3, padding=(1, 1)))
    tile = half(torch.rand(2, 16, size, size))
    contenders = {
        "TorchMN": lambda: image.get_fprop_view(tile),
        "copy only": lambda: torch.nn.functional.pad(tile, (1, 1, 1, 1)),
    }
    return take_turns(contenders, options, iterations=20)


def main() -> None:
    parser = arguments(__doc__, rounds=21)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 128], help="heights and widths of images")
    options = parser.parse_args()
    comm = two_ranks()
    torch.manual_seed(0)
    results = Results("image")
    for size in options.sizes:
        results.add(f"{size}x{size}", compare(size, comm, options))
    for size in options.sizes:
        results.add(f"exchange, {size}x{size}", compare_exchange(size, comm, options))
    if comm.rank == 0:
        results.finish(options)


if __name__ == "__main__":
    main()
