"""The sparse autoencoder on two ranks beside one, and local filters beside loops over their positions.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/gb.py

MNIST configuration with its own batch of 100 images, float32.
  one        the whole step on one rank with one thread, the other rank asleep
  ours       halopar, the image cut into two tiles: each rank its own filters
  copies     datapar: a copy of the model on each rank, half of the images each, gradients summed
  tile       ours, on both ranks, with no message: halos of zeros, and sums of this rank's part alone
  lone tile  the same on rank 0, the other rank asleep
  apart      a plain model on each rank at the same time, half of the images each, and nothing exchanged at all: what
             these two cores can do with half of the work
  position   a loop over output positions: the patch of all images times the position's filters, written into the output
  stacked    the same, with all products put together at the end
Contenders take turns; a turn is as long as its slowest rank. `quickest` compares the quickest turns: where the speed of
a machine varies, two ranks meet a slow moment twice as often as one. From `one` to `lone tile` is what the cut leaves
to do, from there to `tile` what two busy cores take from each other, from there to `ours` what messages cost. Loops are
timed on rank 0 alone, forward and backward by autograd, to the gradients of images and filters. Steps of pretraining
are those of `pretrain` without `progress=`: costs are summed over ranks at the end of an epoch. Steps of fine-tuning
are those of `fine_tune`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from unittest import mock

import side_by_side
import torch
from mpi4py import MPI
from torch import Tensor, nn

import torchmn
from torchmn.communicators.transports.mpi import MPITransport
from torchmn.communicators.transports.transport import DONE, Exchange
from torchmn.functions.halo_messages import _HEADER
from torchmn.models import MNIST, SparseAutoencoder
from torchmn.models.fine_tuning import fine_tuning_step
from torchmn.models.placement import Placement
from torchmn.models.pretraining import pretraining_step, stack_inputs
from torchmn.nn import LocalFilter2d, vector_linear

WORLD = MPI.COMM_WORLD


def fine_tuning(model: SparseAutoencoder, x: Tensor, labels: Tensor, is_silent: bool = False) -> Callable[[], object]:
    """A step of the whole network: forward, backward, update, renormalisation."""
    placement = Placement(model, model.in_shape)
    updates = Placement(nn.Module(), model.in_shape) if is_silent else placement
    optimizer = updates.optimizer(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return lambda: fine_tuning_step(model, optimizer, placement.part(x), labels)


def pretraining(model: SparseAutoencoder, x: Tensor, number: int) -> Callable[[], object]:
    """A step of one stack, with the stacks below it."""
    placement = Placement(model, model.in_shape)

    def step() -> None:
        inputs = stack_inputs(model, placement.part(x), number)
        pretraining_step(model.stacks[number], inputs, model.sparsity, 0.01, placement)

    return step


def silent(step: Callable[[], object]) -> Callable[[], None]:
    """The step of a tiled model without messages: whoever waits gets zeros, and sums are this rank's own."""

    def zeros(_, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Exchange:
        for room, sent in zip(incoming.values(), outgoing.values(), strict=True):
            room.zero_()
            room[: _HEADER.size] = sent[: _HEADER.size]
        return DONE

    def run() -> None:
        with (
            mock.patch.object(MPITransport, "exchange", zeros),
            mock.patch.object(vector_linear, "sum_of_parts", lambda x, _: x),
        ):
            step()

    return run


def race_ranks(comm: torchmn.Communicator, rounds: int) -> str:
    torch.manual_seed(0)
    whole, labels = torch.rand(100, 1, 28, 28), torch.randint(10, (100,))
    rows, copies = torchmn.ProcessGrid(comm, height=comm.size), torchmn.ProcessGrid(comm, data=comm.size)
    plain: SparseAutoencoder = MNIST.model()
    tiled: SparseAutoencoder = torchmn.parallelize(plain, rows, "halopar")  # type: ignore[assignment]
    copied: SparseAutoencoder = torchmn.parallelize(plain, copies, "datapar")  # type: ignore[assignment]
    tile, half, half_labels = (
        part.tensor_split(comm.size, dim=dim)[comm.rank].contiguous()
        for part, dim in ((whole, 2), (whole, 0), (labels, 0))
    )
    milliseconds, speeds = [], []
    for name, make in _steps().items():
        without_messages = silent(make(tiled, tile, labels, is_silent=True))
        contenders = {
            "one": side_by_side.alone(make(plain, whole, labels)),
            "ours": make(tiled, tile, labels),
            "tile": without_messages,
            "lone tile": side_by_side.alone(without_messages),
            "copies": make(copied, half, half_labels),
            "apart": make(plain, half, half_labels),
        }
        turns = {who: comm.allreduce(times, "max") for who, times in _turns(contenders, rounds).items()}
        medians = {who: times.median().item() for who, times in turns.items()}
        least = {who: times.min().item() for who, times in turns.items()}
        for who in ("ours", "copies"):
            side_by_side.keep(f"{name}, {who}", medians[who])
        rivals = [who for who in contenders if who != "one"]
        milliseconds.append([name, *(f"{medians[who] * 1e3:.1f} / {least[who] * 1e3:.1f}" for who in contenders)])
        speeds.append(
            [name, *(f"{medians['one'] / medians[who]:.2f} / {least['one'] / least[who]:.2f}" for who in rivals)]
        )
    counts = [sum(p.numel() for p in model.parameters()) for model in (plain, tiled)]
    share = f"parameters: {counts[0]}, of which rank 0 holds {counts[1]}: {counts[1] / counts[0]:.2f}"
    times = side_by_side.table(["ms, median / quickest", *contenders], milliseconds)
    ratios = side_by_side.table(["as fast as one, median / quickest", *rivals], speeds)
    return f"{times}\n\n{ratios}\n\n{share}"


def _steps() -> dict[str, Callable[..., Callable[[], object]]]:
    def of_stack(number: int) -> Callable[..., Callable[[], object]]:
        return lambda model, x, labels, is_silent=False: pretraining(model, x, number)

    stacks = range(len(MNIST.kernel))
    return {"fine-tuning": fine_tuning, **{f"pretraining, stack {n}": of_stack(n) for n in stacks}}


def _turns(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Tensor]:
    """The seconds of each turn of each contender on this rank, after one turn to warm up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}

    def timed(name: str) -> Callable[[], None]:
        def run() -> None:
            start = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - start)

        return run

    side_by_side.take_turns({name: timed(name) for name in contenders}, 1, rounds, WORLD.Barrier)
    # Two steps in a turn: one to bring the contender's data into the caches, and after the barrier the one that counts.
    return {name: torch.tensor(values[3::2], dtype=torch.float64) for name, values in times.items()}


def by_position(layer: LocalFilter2d, x: Tensor) -> Tensor:
    """The plain program: for each position, its patch times its filters, written into the output."""
    (rows, columns), (height, width) = layer.out_size, layer.kernel
    y = x.new_zeros(len(x), layer.out_maps, rows, columns)
    for r in range(rows):
        for q in range(columns):
            patch = x[:, :, r : r + height, q : q + width].flatten(1)
            y[:, :, r, q] = patch @ layer.weight[r, q].flatten(1).t()
    return y


def by_position_stacked(layer: LocalFilter2d, x: Tensor) -> Tensor:
    """The same products, put together at the end, which saves a copy of the output's gradient at each position."""
    (rows, columns), (height, width) = layer.out_size, layer.kernel
    products = [
        x[:, :, r : r + height, q : q + width].flatten(1) @ layer.weight[r, q].flatten(1).t()
        for r in range(rows)
        for q in range(columns)
    ]
    return torch.stack(products, dim=2).view(len(x), layer.out_maps, rows, columns)


def race_loops(rounds: int) -> str:
    """Our local filters beside loops, for the three layers of the configuration."""
    rows = []
    for batch in (100, 1):
        for stack in MNIST.model().stacks:
            rows.append(_race_loops(stack.filter, batch, rounds))
    header = ["layer", "batch", "ours ms", "position ms", "stacked ms", "position/ours", "stacked/ours"]
    return side_by_side.table(header, rows)


def _race_loops(layer: LocalFilter2d, batch: int, rounds: int) -> list[str]:
    x = torch.rand(batch, layer.in_maps, *layer.in_size, requires_grad=True)
    assert torch.allclose(layer(x), by_position(layer, x), atol=1e-4)
    assert torch.allclose(layer(x), by_position_stacked(layer, x), atol=1e-4)

    def trained(forward: Callable[[LocalFilter2d, Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = layer.weight.grad = None
            y = forward(layer, x)
            y.backward(torch.ones_like(y))

        return run

    contenders = {
        "ours": trained(lambda layer, x: layer(x)),
        "position": trained(by_position),
        "stacked": trained(by_position_stacked),
    }
    seconds = side_by_side.take_turns(contenders, iterations=1, rounds=rounds, barrier=lambda: None)
    times = [f"{seconds[who] * 1e3:.1f}" for who in contenders]
    ratios = [f"{seconds[who] / seconds['ours']:.0f}" for who in ("position", "stacked")]
    kernel = f"{layer.in_maps} x {layer.in_size[0]}², {layer.kernel[0]}² kernel"
    return [kernel, str(batch), *times, *ratios]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=25)
    options = side_by_side.parsed(arguments)
    torch.set_num_threads(1)
    with torchmn.create_communicator("mpi") as comm:
        report = race_ranks(comm, options.rounds)
        loops: list[str] = []
        side_by_side.alone(lambda: loops.append(race_loops(min(options.rounds, 3))))()
        if comm.rank == 0:
            version = MPI.Get_library_version().splitlines()[0]
            print(f"Run of {side_by_side.environment(version)}, {comm.size} ranks\n")
            print(report + "\n")
            print(loops[0])
        side_by_side.write_json(options.json, comm.rank)


if __name__ == "__main__":
    main()
