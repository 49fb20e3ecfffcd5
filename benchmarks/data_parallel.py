"""Our optimizer beside DistributedDataParallel over gloo, and beside one rank alone: two ranks, one run.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/data_parallel.py

Every rank trains on batches of its own, of the same size as the one rank alone: samples per second, whole job.
DDP and `one rank` run in plain processes, as their users start them (plain_process.py), and take turns with ours.

The other contenders run in our processes, where our communicator has told malloc to keep freed memory, and show where
the difference comes from. `DDP here` and `one here`: the same two again. `apart`: two ranks that never hear of each
other. `met`: two ranks that do nothing together but wait for each other in every step, as whoever takes a mean must.
`views`: all gradients as views of one flat buffer into which backward adds, zeroed and all-reduced in place, with no
checks of gradients. What they need of memory: peak_memory.py.
"""

from __future__ import annotations

import argparse
import os

import side_by_side
import torch
import torch.distributed as dist
from gloo import free_port, start_gloo
from mnist_nets import MODELS, OPTIMIZERS, batch_of, training
from mpi4py import MPI
from plain_process import Elsewhere, PlainProcess
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import torchmn

WORLD = MPI.COMM_WORLD


class FlatViews:
    """The gradients of a model as views of one buffer, of which it takes the mean over ranks."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, comm: torchmn.Communicator):
        self.comm = comm
        parameters = list(model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, part in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.zero_grad = lambda set_to_none=True: self.flat.zero_()  # type: ignore[method-assign]

    def take_mean(self) -> None:
        self.comm.allreduce(self.flat, "mean", in_place=True)


def race(name: str, rule: str, comm: torchmn.Communicator, plain: PlainProcess, rounds: int) -> list[str]:
    make, batch, iterations = MODELS[name]
    x, y = batch_of(name)
    models = {which: make() for which in ("ours", "DDP here", "one here", "apart", "met", "views")}
    models["DDP here"] = DistributedDataParallel(models["DDP here"])
    optimizers = {which: OPTIMIZERS[rule](model) for which, model in models.items()}
    optimizers["ours"] = torchmn.create_multi_node_optimizer(optimizers["ours"], comm, model=models["ours"])
    views = FlatViews(models["views"], optimizers["views"], comm)
    before_step = {"met": WORLD.Barrier, "views": views.take_mean}
    here = {which: training(model, optimizers[which], x, y, before_step.get(which)) for which, model in models.items()}
    contenders = {
        "ours": here["ours"],
        "DDP": Elsewhere(plain, f"DDP {name} {rule}", comm.rank),
        "one rank": Elsewhere(plain, f"one {name} {rule}", comm.rank, alone=True),
        "DDP here": here["DDP here"],
        "one here": side_by_side.alone(here["one here"]),
        **{which: here[which] for which in ("apart", "met", "views")},
    }
    turns = side_by_side.times_in_turns(contenders, iterations, rounds, barrier=WORLD.Barrier)
    seconds = side_by_side.of_the_job(turns)
    side_by_side.keep(f"{name}, {rule}", seconds["ours"])
    rate = {which: batch * (1 if "one" in which else comm.size) / value for which, value in seconds.items()}
    shares = [rate["ours"] / rate["DDP"], rate["ours"] / (comm.size * rate["one rank"])]
    shares += [rate[which] / rate["DDP here"] for which in ("ours", "apart", "met", "views")]
    shares += [rate[which] / (comm.size * rate["one here"]) for which in ("ours", "apart", "met", "views")]
    return [name, rule, *(f"{rate[which]:.0f}" for which in contenders), *(f"{share:.2f}" for share in shares)]


def race_of_overlap(name: str, comm: torchmn.Communicator, rounds: int) -> list[str]:
    """Gradients that travel during backward beside those that travel after it."""
    make, batch, iterations = MODELS[name]
    x, y = batch_of(name)
    contenders = {}
    for which in ("after", "during"):
        model = make()
        optimizer = torchmn.create_multi_node_optimizer(
            OPTIMIZERS["SGD"](model), comm, model=model, overlap=which == "during"
        )
        contenders[which] = training(model, optimizer, x, y)
    seconds = side_by_side.take_turns(contenders, iterations, rounds, barrier=WORLD.Barrier)
    for which in contenders:
        side_by_side.keep(f"{name}, {comm.traits.name}, {which} backward", seconds[which])
    rates = [f"{batch * comm.size / seconds[which]:.0f}" for which in contenders]
    return [comm.traits.name, name, *rates, f"{seconds['after'] / seconds['during']:.2f}"]


def gloo_communicator() -> torchmn.Communicator:
    """One over gloo between the processes of this MPI job."""
    port = free_port()
    rank, size = str(WORLD.rank), str(WORLD.size)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": rank, "WORLD_SIZE": size}
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return torchmn.create_communicator("gloo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overlap", action="store_true", help="only overlap with backward, over MPI and over gloo")
    parser.add_argument("--rounds", type=int, default=15, help="turns per contender; the median counts")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    options = side_by_side.parsed(parser)
    torch.set_num_threads(1)
    torch.manual_seed(0)
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
        plain = PlainProcess("rivals.py", comm.rank, comm.size, free_port())
        rows = [race(name, rule, comm, plain, options.rounds) for rule in options.optimizers for name in options.models]
        plain.close()
        header = ["model", "optimizer", "ours /s", "DDP /s", "one rank /s"]
        header += ["DDP here /s", "one here /s", "apart /s", "met /s", "views /s"]
        header += ["ours/DDP", "ours of twice one rank"]
        header += ["ours/DDP here", "apart/DDP here", "met/DDP here", "views/DDP here"]
        header += ["ours of twice here", "apart of twice", "met of twice", "views of twice"]
    if comm.rank == 0:
        print(side_by_side.environment(MPI.Get_library_version().splitlines()[0].replace("\t", " ").strip()))
        print(side_by_side.table(header, rows))
    side_by_side.write_json(options.json, comm.rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
