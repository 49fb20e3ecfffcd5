"""Part (b) of model_parallel.py: a pipeline of two equal stages, ours and that of torch.distributed.pipelining.

Times are milliseconds of one training step (forward, loss, backward) over a whole batch. With m micro-batches, two
stages that cost nothing to connect are 2m/(m+1) times as fast as one after the other; `of bound` is the share of that
which our speed-up over m=1 reaches, `GPipe/ours` how many times faster than torch's GPipe schedule over gloo we are:
the median over turns, in each of which both ran, one right after the other. `micro ms` is what a micro-batch costs a
stage, forward and backward. Torch's runs in processes of its own, as its users start it (plain_process.py).
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import side_by_side
from gloo import free_port
from mpi4py import MPI
from plain_process import Elsewhere, PlainProcess
from stages import MICROBATCHES, batch, checked, stage
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import torchmn
from torchmn.graph import MultiNodeChainList


def ours(
    comm: torchmn.Communicator, module: nn.Module, microbatches: int, x: Tensor, target: Tensor
) -> Callable[[], None]:
    chain = MultiNodeChainList(comm, microbatches)
    chain.add_link(module, *((None, 1) if comm.rank == 0 else (0, None)))

    def step() -> None:
        chain.zero_grad()
        result = chain(x)
        loss = result if comm.rank == 0 else mse_loss(result, target)
        loss.backward()

    return step


def contenders_of(comm: torchmn.Communicator, plain: PlainProcess) -> side_by_side.Contenders:
    """Ours and torch's for each number of micro-batches."""
    contenders: dict[str, Callable[[], object] | Elsewhere] = {}
    for m in MICROBATCHES:
        module = stage()
        contenders[f"ours {m}"] = checked(ours(comm, module, m, *batch()), module, comm.rank)
        contenders[f"GPipe {m}"] = Elsewhere(plain, f"GPipe {m}", comm.rank)
    return contenders


def table(comm: torchmn.Communicator, rounds: int) -> str:
    """A row for each number of micro-batches."""
    plain = PlainProcess("rivals.py", comm.rank, comm.size, free_port())
    pairs = [[f"ours {m}", f"GPipe {m}"] for m in MICROBATCHES]
    turns = side_by_side.times_in_turns(contenders_of(comm, plain), 2, rounds, MPI.COMM_WORLD.Barrier, pairs)
    plain.close()
    seconds = {name: median(times) for name, times in turns.items()}
    rows = []
    for m in MICROBATCHES:
        mine, theirs = seconds[f"ours {m}"], seconds[f"GPipe {m}"]
        side_by_side.keep(f"pipeline, {m} micro-batches", mine)
        speed_up, bound = seconds["ours 1"] / mine, 2 * m / (m + 1)
        times = [f"{1e3 * value:.1f}" for value in (mine, theirs, mine / (m + 1))]
        faster = median(b / a for a, b in zip(turns[f"ours {m}"], turns[f"GPipe {m}"], strict=False))
        ratios = [f"{ratio:.2f}" for ratio in (speed_up, bound, speed_up / bound)] + [f"{faster:.3f}"]
        rows.append([str(m), *times, *ratios])
    return side_by_side.table(
        ["m", "ours ms", "GPipe ms", "micro ms", "speed-up", "bound", "of bound", "GPipe/ours"], rows
    )
