"""Data parallel training on two ranks: TorchMN over MPI, and DistributedDataParallel over gloo.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/data_parallel.py
    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/data_parallel.py --overlap

Each rank trains on random batches of 100 (MLP) or 64 images. Times are those of one step of both ranks.
  DDP               in separate processes, as its users start it (baseline_process.py)
  one rank          two steps of one separate process: the same number of samples
  DDP, our process  DDP in the processes of the benchmark, in which malloc keeps freed memory
  no communication  two ranks that train independently
  barrier only      two ranks that only wait for each other in each step
  flat buffer       all gradients are views of one buffer, which is zeroed, added to by backward, and all-reduced in
                    place; ranks do not compare gradients

`--overlap` compares gradients that are all-reduced after backward with gradients that are sent during backward, over
MPI and over gloo.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from baseline_process import Baseline, BaselineProcess
from gloo import common_port, start_gloo
from mnist_nets import MODELS, OPTIMIZERS, batch_of, training
from results import Results, arguments
from timing import WORLD, Times, take_turns, two_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import torchmn

OVERLAP_MODELS = ("MLP 784-1000-1000-10", "conv 20-50, fc 500")


class FlatBuffer:
    """The gradients of a model as views of one buffer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, comm: torchmn.Communicator):
        self.comm = comm
        parameters = list(model.parameters())
        self.buffer = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, view in zip(parameters, self.buffer.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = view.view_as(parameter)
        optimizer.zero_grad = lambda set_to_none=True: self.buffer.zero_()  # type: ignore[method-assign]

    def take_mean(self) -> None:
        self.comm.allreduce(self.buffer, "mean", in_place=True)


def compare(
    name: str, optimizer: str, comm: torchmn.Communicator, process: BaselineProcess, options: argparse.Namespace
) -> Times:
    make, _, iterations = MODELS[name]
    x, y = batch_of(name)
    here = ("TorchMN", "DDP, our process", "no communication", "barrier only", "flat buffer")
    models = {contender: make() for contender in here}
    models["DDP, our process"] = DistributedDataParallel(models["DDP, our process"])
    optimizers = {contender: OPTIMIZERS[optimizer](model) for contender, model in models.items()}
    optimizers["TorchMN"] = torchmn.create_multi_node_optimizer(optimizers["TorchMN"], comm, model=models["TorchMN"])
    flat = FlatBuffer(models["flat buffer"], optimizers["flat buffer"], comm)
    before_step = {"barrier only": WORLD.Barrier, "flat buffer": flat.take_mean}
    steps = {
        contender: training(models[contender], optimizers[contender], x, y, before_step.get(contender))
        for contender in here
    }
    contenders = {
        "TorchMN": steps["TorchMN"],
        "DDP": Baseline(process, f"DDP {name} {optimizer}", comm.rank),
        "one rank": Baseline(process, f"one {name} {optimizer}", comm.rank, alone=True),
        **steps,
    }
    times = take_turns(contenders, options, iterations)
    times["one rank"] = [comm.size * seconds for seconds in times["one rank"]]
    return times


def compare_overlap(name: str, comm: torchmn.Communicator, options: argparse.Namespace) -> Times:
    make, _, iterations = MODELS[name]
    contenders = {}
    for contender, overlap in (("TorchMN", False), ("TorchMN, overlap=True", True)):
        model = make()
        optimizer = OPTIMIZERS["SGD"](model)
        optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model=model, overlap=overlap)
        contenders[contender] = training(model, optimizer, *batch_of(name))
    return take_turns(contenders, options, iterations)


def gloo_communicator() -> torchmn.Communicator:
    """A communicator over gloo between the processes of this MPI job."""
    rank, size = str(WORLD.rank), str(WORLD.size)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(common_port()), "RANK": rank, "WORLD_SIZE": size}
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GLOO_SOCKET_IFNAME": "lo"}
    return torchmn.create_communicator("gloo")


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--overlap", action="store_true", help="compare all-reduce after and during backward")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    options = parser.parse_args()
    torch.manual_seed(0)
    comm = two_ranks()
    if options.overlap:
        results = Results("model, transport")
        for transport, world in (("MPI", comm), ("gloo", gloo_communicator())):
            for name in OVERLAP_MODELS:
                results.add(f"{name}, {transport}", compare_overlap(name, world, options))
    else:
        results = Results("model, optimizer")
        start_gloo()
        process = BaselineProcess(comm.rank, comm.size, common_port())
        for optimizer in options.optimizers:
            for name in options.models:
                results.add(f"{name}, {optimizer}", compare(name, optimizer, comm, process, options))
        process.close()
        dist.destroy_process_group()
    if comm.rank == 0:
        results.finish(options)


if __name__ == "__main__":
    main()
