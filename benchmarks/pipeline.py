"""Part (b) of model_parallel.py: a pipeline of two equal stages, ours and that of torch.distributed.pipelining.

Times are milliseconds of one training step (forward, loss, backward) over a whole batch. With m micro-batches, two
stages that cost nothing to connect are 2m/(m+1) times as fast as one after the other; `of bound` is the share of that
which our speed-up over m=1 reaches, `GPipe/ours` how many times faster than torch's GPipe schedule over gloo we are:
the median over turns, in each of which both ran. `micro ms` is what a micro-batch costs a stage, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import side_by_side
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss

import torchmn
from torchmn.graph import MultiNodeChainList

MICROBATCHES = (1, 2, 4, 8)
BATCH, WIDTH, LAYERS = 2048, 384, 4


def stage() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


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


def gpipe(rank: int, module: nn.Module, microbatches: int, x: Tensor, target: Tensor) -> Callable[[], None]:
    part = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(part, n_microbatches=microbatches, loss_fn=mse_loss)

    def step() -> None:
        module.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=[])

    return step


def contenders_of(comm: torchmn.Communicator) -> dict[str, Callable[[], None]]:
    """Ours and torch's for each number of micro-batches, all of which must have the same gradients."""
    torch.manual_seed(1)
    x, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    contenders, reference = {}, None
    for m in MICROBATCHES:
        for name, module in ((f"ours {m}", stage()), (f"GPipe {m}", stage())):
            make = ours(comm, module, m, x, target) if "ours" in name else gpipe(comm.rank, module, m, x, target)
            make()
            gradients = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])  # type: ignore[union-attr]
            reference = gradients if reference is None else reference
            torch.testing.assert_close(gradients, reference, rtol=1e-3, atol=1e-7)
            contenders[name] = make
    return contenders


def table(comm: torchmn.Communicator, rounds: int) -> str:
    """A row for each number of micro-batches; gloo must have been started."""
    turns = side_by_side.times_in_turns(contenders_of(comm), 2, rounds, MPI.COMM_WORLD.Barrier)
    seconds = {name: median(times) for name, times in turns.items()}
    rows = []
    for m in MICROBATCHES:
        mine, theirs = seconds[f"ours {m}"], seconds[f"GPipe {m}"]
        speed_up, bound = seconds["ours 1"] / mine, 2 * m / (m + 1)
        times = [f"{1e3 * value:.1f}" for value in (mine, theirs, mine / (m + 1))]
        faster = median(b / a for a, b in zip(turns[f"ours {m}"], turns[f"GPipe {m}"], strict=True))
        ratios = [f"{ratio:.2f}" for ratio in (speed_up, bound, speed_up / bound)] + [f"{faster:.3f}"]
        rows.append([str(m), *times, *ratios])
    return side_by_side.table(
        ["m", "ours ms", "GPipe ms", "micro ms", "speed-up", "bound", "of bound", "GPipe/ours"], rows
    )
