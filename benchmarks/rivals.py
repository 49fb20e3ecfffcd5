"""The rivals of data_parallel.py and pipeline.py, over gloo, in processes of their own: see plain_process.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from mnist_nets import MODELS, OPTIMIZERS, batch_of, training
from plain_process import serve
from stages import MICROBATCHES, batch, checked, stage
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def ddp(name: str, rule: str) -> Callable[[], None]:
    """One step of DistributedDataParallel."""
    model = DistributedDataParallel(MODELS[name][0]())
    return training(model, OPTIMIZERS[rule](model), *batch_of(name))


def one(name: str, rule: str) -> Callable[[], None]:
    """The same training in one process alone, which knows nothing of others."""
    model = MODELS[name][0]()
    return training(model, OPTIMIZERS[rule](model), *batch_of(name))


def gpipe(microbatches: int) -> Callable[[], None]:
    """One step of torch's GPipe schedule."""
    rank, module = dist.get_rank(), stage()
    x, target = batch()
    part = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(part, n_microbatches=microbatches, loss_fn=mse_loss)

    def step() -> None:
        module.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=[])

    return checked(step, module, rank)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    together = {f"DDP {name} {rule}": partial(ddp, name, rule) for name in MODELS for rule in OPTIMIZERS}
    alone = {f"one {name} {rule}": partial(one, name, rule) for name in MODELS for rule in OPTIMIZERS}
    pipelines = {f"GPipe {m}": partial(gpipe, m) for m in MICROBATCHES}
    serve(together | alone | pipelines, dist.barrier, alone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
