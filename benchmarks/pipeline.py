"""A pipeline of two equal stages beside torch.distributed.pipelining, on two ranks, in one run.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/pipeline.py

Times are milliseconds of one training step (forward, loss, backward) over a whole batch. With m micro-batches two
stages that cost nothing to connect are 2m/(m+1) times as fast as one after the other; `of bound` is the share of that
which our speed-up over m=1 reaches, `GPipe/ours` how many times faster than torch's GPipe schedule over gloo.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import side_by_side
import torch
import torch.distributed as dist
from gloo import start_gloo
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss

import torchmn
from torchmn.graph import MultiNodeChainList

MICROBATCHES = (1, 2, 4, 8)
BATCH, WIDTH, LAYERS = 1024, 512, 4


def stage() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def ours(comm: torchmn.Communicator, microbatches: int, x: Tensor, target: Tensor) -> Callable[[], None]:
    chain = MultiNodeChainList(comm, microbatches)
    chain.add_link(stage(), *((None, 1) if comm.rank == 0 else (0, None)))

    def step() -> None:
        chain.zero_grad()
        result = chain(x)
        loss = result if comm.rank == 0 else mse_loss(result, target)
        loss.backward()

    return step


def torchs(rank: int, microbatches: int, x: Tensor, target: Tensor) -> Callable[[], None]:
    module = stage()
    part = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(part, n_microbatches=microbatches, loss_fn=mse_loss)

    def step() -> None:
        module.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=[])

    return step


def rows(comm: torchmn.Communicator, rounds: int) -> list[list[str]]:
    """A line of the table for each number of micro-batches; gloo must have been started."""
    x, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    contenders: dict[str, Callable[[], object]] = {}
    for m in MICROBATCHES:
        contenders[f"ours {m}"] = ours(comm, m, x, target)
        contenders[f"GPipe {m}"] = torchs(comm.rank, m, x, target)
    seconds = side_by_side.take_turns(contenders, 3, rounds, MPI.COMM_WORLD.Barrier)
    lines = []
    for m in MICROBATCHES:
        mine, theirs = seconds[f"ours {m}"], seconds[f"GPipe {m}"]
        speed_up, bound = seconds["ours 1"] / mine, 2 * m / (m + 1)
        times = [f"{1e3 * mine:.1f}", f"{1e3 * theirs:.1f}"]
        ratios = [f"{ratio:.2f}" for ratio in (speed_up, bound, speed_up / bound, theirs / mine)]
        lines.append([str(m), *times, *ratios])
    return lines


HEADER = ["m", "ours ms", "GPipe ms", "speed-up", "bound", "of bound", "GPipe/ours"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="turns per contender; the median counts")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    comm = torchmn.create_communicator("mpi")
    if comm.size != 2:
        raise SystemExit("benchmarks/pipeline.py runs on 2 ranks: mpiexec -n 2 python benchmarks/pipeline.py")
    start_gloo()
    lines = rows(comm, rounds)
    if comm.rank == 0:
        print(side_by_side.environment(MPI.Get_library_version().splitlines()[0].replace("\t", " ").strip()))
        print(side_by_side.table(HEADER, lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
