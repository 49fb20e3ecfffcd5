"""A pipeline of two equal stages: `MultiNodeChainList` over MPI, and torch.distributed.pipelining over gloo.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/pipeline.py

Times are those of one training step (forward, loss, backward) over a whole batch.
  torch GPipe    torch's GPipe schedule, in separate processes (baseline_process.py)
  sequential     TorchMN with 1 micro-batch: one stage runs after the other
  ideal          with m micro-batches, two stages with free communication take (m+1)/2m of that time
"""

from __future__ import annotations

from collections.abc import Callable

from baseline_process import Baseline, BaselineProcess
from gloo import common_port
from pipeline_model import MICROBATCHES, batch, checked, stage
from results import Results, arguments
from timing import take_turns, two_ranks
from torch import nn
from torch.nn.functional import mse_loss

import torchmn
from torchmn.graph import MultiNodeChainList


def training_step(comm: torchmn.Communicator, module: nn.Module, microbatches: int) -> Callable[[], None]:
    x, target = batch()
    chain = MultiNodeChainList(comm, microbatches)
    chain.add_link(module, *((None, 1) if comm.rank == 0 else (0, None)))

    def step() -> None:
        chain.zero_grad()
        result = chain(x)
        loss = result if comm.rank == 0 else mse_loss(result, target)
        loss.backward()

    return step


def main() -> None:
    options = arguments(__doc__, rounds=11).parse_args()
    comm = two_ranks()
    process = BaselineProcess(comm.rank, comm.size, common_port())
    contenders: dict[str, Callable[[], object] | Baseline] = {}
    for m in MICROBATCHES:
        module = stage()
        contenders[f"TorchMN {m}"] = checked(training_step(comm, module, m), module, comm.rank)
        contenders[f"GPipe {m}"] = Baseline(process, f"GPipe {m}", comm.rank)
    pairs = [[f"TorchMN {m}", f"GPipe {m}"] for m in MICROBATCHES]
    times = take_turns(contenders, options, iterations=2, groups=pairs)
    process.close()
    results = Results("batch")
    sequential = times["TorchMN 1"]
    for m in MICROBATCHES:
        values = {"TorchMN": times[f"TorchMN {m}"], "torch GPipe": times[f"GPipe {m}"]}
        ideal = [seconds * (m + 1) / (2 * m) for seconds in sequential]
        results.add(f"{m} micro-batch{'es' * (m > 1)}", values | {"sequential": sequential, "ideal": ideal})
    if comm.rank == 0:
        results.finish(options)


if __name__ == "__main__":
    main()
