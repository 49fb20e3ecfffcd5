"""Our optimizer beside DistributedDataParallel over gloo, and beside one rank alone: two ranks, one run.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/data_parallel.py

Every rank trains on batches of its own, of the same size as the one rank alone: samples per second, whole job.
Three more contenders show what is possible: `apart`, two ranks that never hear of each other; `met`, two ranks that
do nothing together but wait for each other in every step, as whoever takes a mean must; and `views`, all gradients as
views of one flat buffer into which backward adds, zeroed and all-reduced in place, with no checks of gradients.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
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
    """That of PyTorch's MNIST example, whose batch size is 64: what most people mean by a two-conv MNIST net."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10)),
    )


def convnet_20_50() -> nn.Module:
    """That of our experiment files."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


def convnet_10_20() -> nn.Module:
    """That of Horovod's MNIST example."""
    return nn.Sequential(
        *(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10)),
    )


def lenet5() -> nn.Module:
    """The classic one, with ReLU and max-pooling: 61,706 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # model, batch of a rank, steps of a turn
    "MLP 784-1000-1000-10": (mlp, 100, 10),
    "conv 32-64, fc 128": (convnet, 64, 3),
    "conv 20-50, fc 500": (convnet_20_50, 64, 8),
    "conv 10-20, fc 50": (convnet_10_20, 64, 10),
    "LeNet-5": (lenet5, 64, 10),
}


def training(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One step of an ordinary loop."""

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Meeting(torch.optim.SGD):
    """Waits for the other rank before it steps, and tells it nothing."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        WORLD.Barrier()
        super().step(closure)


class FlatViews(torch.optim.SGD):
    """SGD whose gradients are views of one buffer, of which it takes the mean over ranks."""

    def __init__(self, model: nn.Module, comm: torchmn.Communicator):
        super().__init__(model.parameters(), lr=0.01, momentum=0.9)
        self.comm = comm
        parameters = list(model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, part in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.flat.zero_()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.comm.allreduce(self.flat, "mean", in_place=True)
        super().step(closure)


def race(name: str, comm: torchmn.Communicator, rounds: int) -> list[str]:
    make, batch, iterations = MODELS[name]
    x, y = torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))
    ours_model, ddp_model, one_model, apart_model, met_model, views_model = (make() for _ in range(6))
    ours = torchmn.create_multi_node_optimizer(sgd(ours_model), comm, model=ours_model)
    ddp_model = DistributedDataParallel(ddp_model)
    contenders = {
        "ours": training(ours_model, ours, x, y),
        "ddp": training(ddp_model, sgd(ddp_model), x, y),
        "one": side_by_side.alone(training(one_model, sgd(one_model), x, y)),
        "apart": training(apart_model, sgd(apart_model), x, y),
        "met": training(met_model, Meeting(met_model.parameters(), lr=0.01, momentum=0.9), x, y),
        "views": training(views_model, FlatViews(views_model, comm), x, y),
    }
    seconds = side_by_side.take_turns(contenders, iterations, rounds, barrier=WORLD.Barrier)
    rate = {which: batch * (1 if which == "one" else comm.size) / value for which, value in seconds.items()}
    return [
        name,
        str(batch),
        *(f"{rate[which]:.0f}" for which in contenders),
        *(f"{rate[which] / rate['ddp']:.2f}" for which in ("ours", "apart", "met", "views")),
        *(f"{rate[which] / (comm.size * rate['one']):.2f}" for which in ("ours", "apart", "met", "views")),
    ]


def race_of_overlap(name: str, comm: torchmn.Communicator, rounds: int) -> list[str]:
    """Gradients that travel during backward beside those that travel after it."""
    make, batch, iterations = MODELS[name]
    x, y = torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))
    contenders = {}
    for which in ("after", "during"):
        model = make()
        optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model=model, overlap=which == "during")
        contenders[which] = training(model, optimizer, x, y)
    seconds = side_by_side.take_turns(contenders, iterations, rounds, barrier=WORLD.Barrier)
    rates = [f"{batch * comm.size / seconds[which]:.0f}" for which in contenders]
    return [type(comm).__name__, name, *rates, f"{seconds['after'] / seconds['during']:.2f}"]


def gloo_communicator() -> torchmn.Communicator:
    """One over gloo between the processes of this MPI job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = WORLD.bcast(free.getsockname()[1])
    rank, size = str(WORLD.rank), str(WORLD.size)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": rank, "WORLD_SIZE": size}
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return torchmn.create_communicator("gloo")


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
    parser.add_argument("--overlap", action="store_true", help="only overlap with backward, over MPI and over gloo")
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
    if options.overlap:
        worlds = [comm, gloo_communicator()]
        names = ("MLP 784-1000-1000-10", "conv 20-50, fc 500")
        rows = [race_of_overlap(name, world, options.rounds) for world in worlds for name in names]
        header = ["communicator", "model", "after backward /s", "during it /s", "during/after"]
    else:
        rows = [race(name, comm, options.rounds) for name in MODELS]
        header = ["model", "batch", "ours /s", "DDP /s", "one rank /s", "apart /s", "met /s", "views /s"]
        header += ["ours/DDP", "apart/DDP", "met/DDP", "views/DDP"]
        header += ["ours of twice one", "apart of twice", "met of twice", "views of twice"]
    if comm.rank == 0:
        print(side_by_side.environment(MPI.Get_library_version().splitlines()[0].replace("\t", " ").strip()))
        print(side_by_side.table(header, rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
