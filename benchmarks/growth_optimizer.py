"""What averaging gradients adds to a step, for 10 to 5,000 tensors of 256 bytes, on two ranks.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/growth_optimizer.py

Values are the time of a step less that of the same step without communication, in the same turn and in a process of the
same kind.
  DDP          DistributedDataParallel over gloo, in separate processes, as its users start it (baseline_process.py)
  MPI by hand  the gradients in one flat tensor, one all-reduce of raw mpi4py, and the means copied back
  gloo by hand  the same over torch.distributed, in the processes of DDP
"""

from __future__ import annotations

import argparse

import torch
from baseline_process import Baseline, BaselineProcess
from gloo import common_port
from many_tensors import NUMBERS, ManyTensors, optimizer_of, training
from mpi4py import MPI
from results import Results, Work, arguments
from timing import WORLD, Times, take_turns, two_ranks
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

import torchmn

STEPS = {10: 200, 100: 100, 1000: 20, 5000: 5}  # per turn


def mean_by_hand(model: nn.Module) -> None:
    """What a user without a library writes: no comparison between ranks."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())
    flat.div_(WORLD.size)
    torch._foreach_copy_(grads, _unflatten_dense_tensors(flat, grads))


def compare(count: int, comm: torchmn.Communicator, process: BaselineProcess, options: argparse.Namespace) -> Times:
    models = {contender: ManyTensors(count) for contender in ("TorchMN", "MPI by hand", "no communication")}
    optimizers = {contender: optimizer_of(model) for contender, model in models.items()}
    optimizers["TorchMN"] = torchmn.create_multi_node_optimizer(optimizers["TorchMN"], comm, model=models["TorchMN"])
    by_hand = models["MPI by hand"]
    before_step = {"MPI by hand": lambda: mean_by_hand(by_hand)}
    contenders = {name: training(model, optimizers[name], before_step.get(name)) for name, model in models.items()}
    baselines = ("DDP", "gloo by hand", "no communication")
    elsewhere = {f"{name}, torch": Baseline(process, f"{name} {count} tensors", comm.rank) for name in baselines}
    times = take_turns(contenders | elsewhere, options, STEPS[count], groups=[list(contenders), list(elsewhere)])
    here, there = times.pop("no communication"), times.pop("no communication, torch")
    return {
        "TorchMN": _less(times["TorchMN"], here),
        "DDP": _less(times["DDP, torch"], there),
        "MPI by hand": _less(times["MPI by hand"], here),
        "gloo by hand": _less(times["gloo by hand, torch"], there),
    }


def _less(times: list[float], without: list[float]) -> list[float]:
    return [seconds - base for seconds, base in zip(times, without, strict=False)]


def main() -> None:
    options = arguments(__doc__, rounds=15).parse_args()
    torch.manual_seed(0)
    comm = two_ranks()
    process = BaselineProcess(comm.rank, comm.size, common_port())
    results = Results("tensors")
    for count in NUMBERS:
        results.add(f"{count:,} tensors", compare(count, comm, process, options), Work("tensors", count))
    process.close()
    if comm.rank == 0:
        results.finish(options)


if __name__ == "__main__":
    main()
