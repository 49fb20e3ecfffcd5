"""`torchmn train` of examples/mnist-mlp.yaml compared with loops written by hand, for three sizes of a batch.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/experiment_rate.py

Times are those of one step of an epoch, on the sample of MNIST: for `torchmn train` with its log, without evaluation
and checkpoints. Loops by hand have the data in memory as float32, where an experiment converts the bytes of each batch,
and compute the same cost by torch's function. On two ranks, each takes half of a batch.
  by hand           batches are slices of the data
  by hand, shuffled  batches are taken in a random order
  DDP, by hand      DistributedDataParallel over gloo, in the processes of the benchmark
On two ranks, loops by hand average gradients with `create_multi_node_optimizer`.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gloo import start_gloo
from results import Results, Work, arguments
from rich.console import Console
from timing import WORLD, Times, alone, take_turns, two_ranks
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot
from torch.nn.parallel import DistributedDataParallel

import torchmn
from torchmn.datasets import mnist
from torchmn.experiment import Experiment, load, parse_set
from torchmn.experiment.train import Request, train

FILE = Path(__file__).parents[1] / "examples" / "mnist-mlp.yaml"
BATCHES, EPOCHS = (30, 300, 3000), 3


def experiment_of(batch: int) -> Experiment:
    return load(FILE, [parse_set(f"epochs={EPOCHS}"), parse_set("metrics=[]"), parse_set(f"batch_size={batch}")])


def trained(experiment: Experiment, comm: torchmn.Communicator, steps: int) -> float:
    """Seconds per step, from the log of `torchmn train`."""
    with tempfile.TemporaryDirectory() as directory:
        out = WORLD.bcast(directory) if comm.size > 1 else directory
        train(experiment, comm, Request(str(FILE), out=f"{out}/run", console=Console(file=io.StringIO())))
        if comm.rank:
            return 0.0
        lines = [json.loads(line) for line in Path(out, "run", "log.jsonl").read_text().splitlines()]
        return sum(line["seconds"] for line in lines if "seconds" in line) / (EPOCHS * steps)


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, rows: slice, shuffled: bool
) -> Callable[[], float]:
    """An epoch written by hand; `rows` are this rank's of each batch. Returns the sum of its losses."""
    dataset = mnist()
    images, targets = dataset.images, one_hot(dataset.labels, 10).float()
    steps = len(images) // batch

    def epoch() -> float:
        total = 0.0
        order = torch.randperm(len(images))
        for step in range(steps):
            x, y = (values[step * batch : (step + 1) * batch] for values in (images, targets))
            if shuffled:
                x, y = (values[order[step * batch : (step + 1) * batch][rows]] for values in (images, targets))
            else:
                x, y = x[rows], y[rows]
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(model(x), y, reduction="sum") / len(x)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total

    return epoch


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def compare(comm: torchmn.Communicator, batch: int, options: argparse.Namespace) -> Times:
    experiment, steps = experiment_of(batch), len(mnist()) // batch
    rows = slice(0, batch) if comm.size == 1 else slice(comm.rank * batch // 2, (comm.rank + 1) * batch // 2)
    seconds: list[float] = []

    def by_library() -> None:
        seconds.append(trained(experiment, comm, steps))

    contenders: dict[str, Callable[[], object]] = {"TorchMN": by_library}
    for shuffled in (False, True):
        model = mlp()
        optimizer = sgd(model)
        if comm.size > 1:
            optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model=model)
        contenders["by hand, shuffled" if shuffled else "by hand"] = loop(model, optimizer, batch, rows, shuffled)
    if comm.size > 1:
        replicated = DistributedDataParallel(mlp())
        contenders["DDP, by hand"] = loop(replicated, sgd(replicated), batch, rows, False)
    else:
        contenders = {name: alone(run) for name, run in contenders.items()}
    times = take_turns(contenders, options)
    times = {name: [each / steps for each in values] for name, values in times.items()}
    # A turn of `torchmn train` also loads the data and writes a report: its log has the seconds of the epochs.
    times["TorchMN"] = WORLD.bcast(seconds[-options.rounds :])
    return times


def main() -> None:
    options = arguments(__doc__, rounds=7).parse_args()
    torch.manual_seed(0)
    world = two_ranks()
    start_gloo()
    own = world.split(world.rank)
    assert own is not None
    results = Results("batch")
    for batch in BATCHES:
        results.add(f"{batch} samples, 1 rank", compare(own, batch, options), Work("samples, 1 rank", batch))
    for batch in BATCHES:
        results.add(f"{batch} samples, 2 ranks", compare(world, batch, options), Work("samples, 2 ranks", batch))
    dist.destroy_process_group()
    if world.rank == 0:
        results.finish(options)


if __name__ == "__main__":
    main()
