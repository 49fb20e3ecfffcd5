"""The highest resident memory of a rank, for data parallel training and for images that are cut over ranks.

    python benchmarks/peak_memory.py

Each value is that of a separate job, because what other contenders import would count; the rank that needs most counts.
TorchMN runs over MPI, `TorchMN, gloo` and DDP run over gloo under torchrun. For the image (the model of halo.py) it is
the memory above that of the process before its first step, and `one rank` computes the whole image.

One job alone, which also prints the kinds of memory at its end (private, of files such as the code of torch, and shared
between ranks; the last two count fully in each rank):

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/peak_memory.py --job TorchMN 'LeNet-5, Adam'
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from mnist_nets import MODELS, OPTIMIZERS, batch_of, training
from results import Results, arguments

STEPS, IMAGE_STEPS = 30, 3
IMAGE = "image 512x512"
TRAININGS = ("MLP 784-1000-1000-10, Adam", "MLP 784-1000-1000-10, SGD", "LeNet-5, Adam")
MPIEXEC = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAINING_JOBS = {"TorchMN": MPIEXEC, "TorchMN, gloo": TORCHRUN, "DDP": TORCHRUN}
IMAGE_JOBS = {"TorchMN": MPIEXEC, "one rank": [sys.executable]}


def training_step(contender: str, case: str) -> Callable[[], None]:
    name, rule = case.rsplit(", ", 1)
    model = MODELS[name][0]()
    optimizer = OPTIMIZERS[rule](model)
    if contender == "DDP":
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    else:
        import torchmn

        optimizer = torchmn.create_multi_node_optimizer(optimizer, torchmn.create_communicator(), model=model)
    return training(model, optimizer, *batch_of(name))


def image_step(contender: str) -> Callable[[], None]:
    from halo import convolutions, cut_model, forward_backward, half

    import torchmn

    x = torch.rand(2, 3, 512, 512)
    if contender == "one rank":
        return forward_backward(convolutions(), x)
    return forward_backward(cut_model(torchmn.create_communicator("mpi"), x), half(x))


def memory() -> dict[str, float]:
    """The peak of this process's resident memory, and its kinds now, in MB."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    names = {"peak": "VmHWM", "private": "RssAnon", "files": "RssFile", "shared": "RssShmem"}
    return {name: int(fields[field].split()[0]) / 1024 for name, field in names.items()}


def run_job(contender: str, case: str) -> None:
    """Train, and print this rank's memory; `counts` is what the table has."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = image_step(contender) if case == IMAGE else training_step(contender, case)
    before = memory()["peak"] if case == IMAGE else 0
    for _ in range(IMAGE_STEPS if case == IMAGE else STEPS):
        step()
    used = memory()
    print({"counts": used["peak"] - before, **used}, flush=True)
    if contender == "DDP":  # the destructors of DDP and its process group may deadlock (torch 2.13)
        torch.distributed.barrier()
        os._exit(0)


def peak(launcher: list[str], contender: str, case: str) -> float:
    """The result of one job, in MB."""
    job = subprocess.run(
        [*launcher, __file__, "--job", contender, case],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return max(float(value) for value in re.findall(r"'counts': ([\d.]+)", job.stdout))


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--job", nargs=2, metavar=("CONTENDER", "CASE"), help="be a rank of one job")
    options = parser.parse_args()
    if options.job:
        run_job(*options.job)
        return
    results = Results("training", unit="MB")
    for case in (*TRAININGS, IMAGE):
        jobs = IMAGE_JOBS if case == IMAGE else TRAINING_JOBS
        results.add(case, {name: [peak(jobs[name], name, case) for _ in range(options.rounds)] for name in jobs})
    results.finish(options)


if __name__ == "__main__":
    main()
