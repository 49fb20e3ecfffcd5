"""A forward of 10 to 500 convolutions that is cut over two ranks with `halopar`, and forwards of new shapes.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/growth_parallelize.py

Convolutions of one channel, 3x3, each with a ReLU, on an image of 16x16: nearly all of the time is that of Python.
  tile alone   the same layers on each rank's half as a separate image, without exchange
  whole image  the same layers on the whole image, on each rank

ResNet-50 has 1/16 of its width, and an image of 64x64; in training its 53 norms have statistics of both ranks.

A new shape: 10 convolutions of four channels on images of 64x64. Values are those of the first forward of an image that
is four rows higher than the last one, or of a batch with one image more.
  later        a later forward of the same shape; for new shapes, `tile alone` is a first forward, too
Counts are those of a forward of rank 0, after the first one; agreements are comparisons of arguments between ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from copy import deepcopy
from types import FrameType

import torch
from resnet import ResNet50
from results import Results, Work, arguments
from timing import WORLD, Times, take_turns, two_ranks
from torch import Tensor, nn

import torchmn
from torchmn.communicators.agreement import Agreement

STEPS = {10: 20, 100: 4, 500: 1}  # forwards per turn


def convolutions(count: int, channels: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()) for _ in range(count)]
    return nn.Sequential(*(layer for pair in layers for layer in pair)).eval()


def cut(model: nn.Module, comm: torchmn.Communicator, shape: tuple[int, ...] | None) -> tuple[nn.Module, Callable]:
    """The parallel model, and a function that returns the number of its collective operations so far."""
    grid = torchmn.ProcessGrid(comm, height=2)
    return torchmn.parallelize(model, grid, "halopar", input_shape=shape), lambda: grid.tiles.group.collectives


def forward(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def calls_of(run: Callable[[], object]) -> tuple[int, int]:
    """Returns the numbers of Python calls and of agreements."""
    calls = agreements = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, agreements
        calls += event == "call"
        agreements += event == "call" and frame.f_code is Agreement._fingerprint.__code__  # of each comparison

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls, agreements


def compare(model: nn.Module, comm: torchmn.Communicator, image: Tensor, layers: int) -> tuple[dict, dict[str, int]]:
    """Returns the contenders for a model, and counts of a forward."""
    parallel, operations = cut(model, comm, tuple(image.shape[1:]))
    run, half = forward(parallel, image), image.shape[2] // 2
    contenders = {
        "TorchMN": run,
        "tile alone": forward(deepcopy(model), image[:, :, :half]),
        "whole image": forward(deepcopy(model), image),
    }
    run()
    before = operations()
    calls, agreements = calls_of(run)
    made = {"collective operations": operations() - before, "agreements": agreements}
    return contenders, {"Python calls per convolution": round(calls / layers), **made}


def new_shapes(comm: torchmn.Communicator, grows: int, rounds: int) -> Times:
    """Times of a first and a later forward, also of the layers alone; dim `grows` of the input is larger each round."""
    alone = convolutions(10, 4)
    model, _ = cut(alone, comm, None)
    times: Times = {"TorchMN": [], "later": [], "tile alone": [], "tile alone, later": []}
    shape = [2, 4, 32, 64]  # this rank's tile
    for turn in range(rounds + 1):
        shape[grows] += 2 if grows > 1 else 1
        x = torch.rand(shape) + comm.rank  # other values on each rank: they are tiles
        for first, net in (("TorchMN", model), ("tile alone", alone)):
            later = "later" if net is model else "tile alone, later"
            seconds = durations(forward(net, x), 4)
            if turn:  # the first turn warms up
                times[first].append(seconds[0])
                times[later].append(min(seconds[1:]))
    ranks = WORLD.allgather(times)
    return {name: [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)] for name in times}


def durations(run: Callable[[], object], count: int) -> list[float]:
    """Returns the seconds of `count` calls, which all ranks begin together."""
    seconds = []
    for _ in range(count):
        WORLD.Barrier()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    options = arguments(__doc__, rounds=9).parse_args()
    torch.manual_seed(0)
    comm = two_ranks()
    results = Results("forward")
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    for count, steps in STEPS.items():
        contenders, counts = compare(convolutions(count), comm, image, count)
        case = f"{count} convolutions"
        results.add(case, take_turns(contenders, options, steps), Work("convolutions", count))
        results.count(case, counts)
    image = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for case, training in (("ResNet-50, evaluation", False), ("ResNet-50, training", True)):
        contenders, counts = compare(ResNet50(width=4).train(training), comm, image, 53)
        results.add(case, take_turns(contenders, options, 4))
        results.count(case, counts)
    results.add("a new image size", new_shapes(comm, 2, options.rounds))
    results.add("a new batch size", new_shapes(comm, 0, options.rounds))
    if comm.rank == 0:
        results.finish(options)


if __name__ == "__main__":
    main()
