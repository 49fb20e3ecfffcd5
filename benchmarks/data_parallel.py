"""Our optimizer beside DistributedDataParallel over gloo, and beside one rank alone: two ranks, one run.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/data_parallel.py

Every rank trains on batches of its own, of the same size as the one rank alone: samples per second, whole job.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable

import side_by_side
import torch
import torch.distributed as dist
from gloo import start_gloo
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import torchmn

WORLD = MPI.COMM_WORLD


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10)
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def training(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One step of an ordinary loop."""

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def race(name: str, make: Callable[[], nn.Module], batch: int, comm: torchmn.Communicator, rounds: int) -> list[str]:
    x, y = torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))
    ours_model, ddp_model, one_model = make(), DistributedDataParallel(make()), make()
    ours = torchmn.create_multi_node_optimizer(sgd(ours_model), comm, model=ours_model)
    contenders = {
        "ours": training(ours_model, ours, x, y),
        "ddp": training(ddp_model, sgd(ddp_model), x, y),
        "one": side_by_side.alone(training(one_model, sgd(one_model), x, y)),
    }
    seconds = side_by_side.take_turns(contenders, iterations=10, rounds=rounds, barrier=WORLD.Barrier)
    rate = {which: batch * (1 if which == "one" else comm.size) / value for which, value in seconds.items()}
    return [
        name,
        str(batch),
        *(f"{rate[which]:.0f}" for which in ("ours", "ddp", "one")),
        f"{rate['ours'] / rate['ddp']:.2f}",
        f"{rate['ours'] / (comm.size * rate['one']):.2f}",
    ]


def memory_of(which: str, make: Callable[[], nn.Module], batch: int) -> None:
    """Train one contender alone and print this job's highest resident memory per rank: for --memory."""
    comm = torchmn.create_communicator("mpi")
    start_gloo()
    model = make()
    x, y = torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))
    if which == "ddp":
        model = DistributedDataParallel(model)
        step = training(model, sgd(model), x, y)
    else:
        step = training(model, torchmn.create_multi_node_optimizer(sgd(model), comm, model=model), x, y)
    for _ in range(30):
        step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    peaks = WORLD.gather(peak)
    if WORLD.rank == 0:
        print(f"peak resident memory, {which}: {max(peaks or [0]):.0f} MB per rank")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns per contender; the median counts")
    parser.add_argument("--memory", choices=("ours", "ddp"), help="only this contender, and print its peak memory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.memory:
        memory_of(options.memory, mlp, 100)
        return
    comm = torchmn.create_communicator("mpi")
    if comm.size != 2:
        raise SystemExit("benchmarks/data_parallel.py runs on 2 ranks: mpiexec -n 2 python benchmarks/data_parallel.py")
    start_gloo()
    rows = [
        race("MLP 784-1000-1000-10", mlp, 100, comm, options.rounds),
        race("two-conv MNIST net", convnet, 64, comm, options.rounds),
    ]
    if comm.rank == 0:
        print(side_by_side.environment(MPI.Get_library_version().splitlines()[0].replace("\t", " ").strip()))
        header = ["model", "batch per rank", "ours /s", "DDP gloo /s", "one rank /s", "ours/DDP", "of twice one rank"]
        print(side_by_side.table(header, rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
