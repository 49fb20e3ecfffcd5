"""An image cut over two ranks beside the whole image on one: speed, the cost of the exchange, memory.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/halo.py
    OMP_NUM_THREADS=1 mpiexec -n 1 python benchmarks/halo.py --memory one
    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/halo.py --memory ours

Four 3x3 convolutions with 16 channels and ReLU on a batch of two images, forward and backward.
  one       the whole image on one rank with one thread, the other rank asleep
  threads   the whole image in one process with two threads, the other rank asleep
  limit     each rank its half of the image as an image of its own: the same local work, no exchange
  ours      the halves of one image, with halos

Contenders take turns. Each turn begins with a step that is not timed, so that nobody pays for what another one left
in the caches, and a barrier; it is one step at 512x512 and four at smaller sizes, and ends with its slowest rank. Times
are medians over turns: 21 at 512x512, 42 at smaller sizes, where noise is a larger part of a step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from collections.abc import Callable

import side_by_side
import torch
from mpi4py import MPI
from torch import Tensor, nn

import torchmn
from torchmn.geometry import Window, owned

WORLD = MPI.COMM_WORLD
# Many short turns at small sizes: on one and the same code, ours beside the limit at 128x128 varied by 0.014 (standard
# deviation) in 40 turns of 4 steps, and by 0.060 in 7 turns of 16, with means of 0.917 and 0.936.
SHORT_STEPS, SHORT_TURNS = 4, 2


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


def pass_through(model: nn.Module, x: Tensor) -> Callable[[], None]:
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
    rows = owned(x.shape[2], WORLD.size, WORLD.rank)
    return x[:, :, rows.start : rows.stop].contiguous()


def race(size: int, comm: torchmn.Communicator, rounds: int) -> list[str]:
    torch.manual_seed(0)
    x = torch.rand(2, 3, size, size)
    grid = torchmn.ProcessGrid(comm, height=comm.size)
    model = torchmn.parallelize(convolutions(), grid, "halopar", input_shape=x.shape[1:], output="tile")
    contenders = {
        "ours": pass_through(model, half(x)),
        "limit": pass_through(convolutions(), half(x)),
        "one": side_by_side.alone(pass_through(convolutions(), x)),
        "threads": side_by_side.alone(pass_through(convolutions(), x), threads=2),
    }
    if size < 512:
        steps, rounds = SHORT_STEPS, SHORT_TURNS * rounds
    else:
        steps = 1
    turns = side_by_side.times_in_turns(contenders, iterations=steps, rounds=rounds, barrier=WORLD.Barrier)
    seconds = side_by_side.of_the_job(turns)
    ours = seconds["ours"]
    side_by_side.keep(f"{size}x{size}", ours)
    return [
        f"{size}x{size}",
        *(f"{seconds[name] * 1e3:.1f}" for name in ("one", "threads", "limit", "ours")),
        f"{seconds['one'] / ours:.2f}",
        f"{seconds['threads'] / ours:.2f}",
        f"{seconds['limit'] / ours:.2f}",
    ]


def exchange_alone(size: int, comm: torchmn.Communicator, rounds: int) -> str:
    """One exchange of two rows of 16 channels, forward only, as each convolution makes."""
    grid = torchmn.ProcessGrid(comm, height=comm.size)
    image = torchmn.GlobalArray(grid, (size, size), Window(3, padding=(1, 1)))
    tile = half(torch.rand(2, 16, size, size))
    run = {
        "exchange": lambda: image.get_fprop_view(tile),
        "copy": lambda: torch.nn.functional.pad(tile, (1, 1, 1, 1)),
    }
    seconds = side_by_side.take_turns(run, iterations=20, rounds=rounds, barrier=WORLD.Barrier)
    side_by_side.keep(f"exchange alone, {size}x{size}", seconds["exchange"])
    return (
        f"exchange alone, {size}x{size}: {seconds['exchange'] * 1e6:.0f} us, of which the copy into the padded buffer "
        f"{seconds['copy'] * 1e6:.0f} us"
    )


def peak(kind: str, size: int) -> float:
    """Peak memory of this process in three steps of `kind`, above what it had once the model was made, in MB."""
    x = torch.rand(2, 3, size, size)
    model = convolutions()
    if kind == "ours":
        comm = torchmn.create_communicator("mpi")
        grid = torchmn.ProcessGrid(comm, height=comm.size)
        model = torchmn.parallelize(model, grid, "halopar", input_shape=x.shape[1:], output="tile")
        x = half(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = pass_through(model, x)
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=21, help="turns at 512x512; twice as many at smaller sizes")
    arguments.add_argument("--sizes", type=int, nargs="+", default=[512, 128], help="heights and widths of images")
    arguments.add_argument("--memory", choices=("one", "ours"), help="only measure the peak memory of one of them")
    options = side_by_side.parsed(arguments)
    torch.set_num_threads(1)
    if options.memory:
        used = peak(options.memory, 512)
        if WORLD.rank == 0:
            print(f"peak memory of {options.memory}: {used:.0f} MB")
        return
    comm = torchmn.create_communicator("mpi")
    rows = [race(size, comm, options.rounds) for size in options.sizes]
    lines = [exchange_alone(size, comm, options.rounds) for size in options.sizes]
    if comm.rank == 0:
        print(side_by_side.environment(f"{comm.size} ranks x 1 thread, cores {multiprocessing.cpu_count()}"))
        header = ["image", "one ms", "2 threads ms", "limit ms", "ours ms", "x one", "x threads", "of limit"]
        print(side_by_side.table(header, rows))
        print("\n".join(lines))
    side_by_side.write_json(options.json, comm.rank)


if __name__ == "__main__":
    main()
