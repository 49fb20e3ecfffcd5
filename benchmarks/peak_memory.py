"""The highest resident memory of each rank that trains the MLP of data_parallel.py: ours, or DDP's over gloo.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/peak_memory.py ours
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peak_memory.py ours
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peak_memory.py ddp

The first over MPI, the others over gloo. A script of its own, since what other contenders import would count: each is
here as its users start it. Beside the peak it says of what kind the memory is at the end: private to the process, of
files (the code of torch and of MPI), and shared with other ranks. Files and shared memory count fully in every rank.
"""

from __future__ import annotations

import argparse

import torch
from mnist_nets import MODELS, OPTIMIZERS, batch_of, training
from torch.optim import Optimizer

STEPS = 30


def ours(model: torch.nn.Module, optimizer: Optimizer) -> tuple[torch.nn.Module, Optimizer]:
    import torchmn

    comm = torchmn.create_communicator()
    return model, torchmn.create_multi_node_optimizer(optimizer, comm, model=model)


def ddp(model: torch.nn.Module, optimizer: Optimizer) -> tuple[torch.nn.Module, Optimizer]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    return DistributedDataParallel(model), optimizer


def memory() -> dict[str, float]:
    """What the kernel says of this process's resident memory, in MB, by its own names."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("contender", choices=("ours", "ddp"))
    arguments.add_argument("--model", choices=MODELS, default="MLP 784-1000-1000-10", metavar="NAME")
    arguments.add_argument("--optimizer", choices=OPTIMIZERS, default="SGD")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODELS[options.model][0]()
    distribute = {"ours": ours, "ddp": ddp}[options.contender]
    step = training(*distribute(model, OPTIMIZERS[options.optimizer](model)), *batch_of(options.model))
    for _ in range(STEPS):
        step()
    peak, private, files, shared = memory().values()
    print(
        f"{options.contender}: peak {peak:.0f} MB; at the end private {private:.0f}, files {files:.0f}, "
        f"shared {shared:.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
