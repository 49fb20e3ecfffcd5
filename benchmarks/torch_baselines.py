"""PyTorch's own data parallel training and pipeline over gloo, served to baseline_process.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from baseline_process import serve
from many_tensors import NUMBERS, ManyTensors, optimizer_of
from many_tensors import training as training_of_many
from mnist_nets import MODELS, OPTIMIZERS, batch_of, training
from pipeline_model import MICROBATCHES, batch, checked, stage
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def ddp(name: str, optimizer: str) -> Callable[[], None]:
    """One step of DistributedDataParallel."""
    model = DistributedDataParallel(MODELS[name][0]())
    return training(model, OPTIMIZERS[optimizer](model), *batch_of(name))


def one_rank(name: str, optimizer: str) -> Callable[[], None]:
    """One step of the same training in a single process."""
    model = MODELS[name][0]()
    return training(model, OPTIMIZERS[optimizer](model), *batch_of(name))


def many_tensors(kind: str, count: int) -> Callable[[], None]:
    """One step of a model of many tensors: with DDP, with one all-reduce by hand, or without communication."""
    model = ManyTensors(count)
    optimizer = optimizer_of(model)

    def take_mean() -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        torch._foreach_copy_(grads, _unflatten_dense_tensors(flat, grads))

    if kind == "DDP":
        return training_of_many(DistributedDataParallel(model), optimizer)
    return training_of_many(model, optimizer, take_mean if kind == "gloo by hand" else None)


def gpipe(microbatches: int) -> Callable[[], None]:
    """One step of torch's GPipe schedule."""
    rank, module = dist.get_rank(), stage()
    x, target = batch()
    pipeline_stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(pipeline_stage, n_microbatches=microbatches, loss_fn=mse_loss)

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
    both_ranks = {
        f"DDP {name} {optimizer}": partial(ddp, name, optimizer) for name in MODELS for optimizer in OPTIMIZERS
    }
    both_ranks |= {
        f"{kind} {count} tensors": partial(many_tensors, kind, count)
        for kind in ("DDP", "gloo by hand", "no communication")
        for count in NUMBERS
    }
    both_ranks |= {f"GPipe {m}": partial(gpipe, m) for m in MICROBATCHES}
    alone = {
        f"one {name} {optimizer}": partial(one_rank, name, optimizer) for name in MODELS for optimizer in OPTIMIZERS
    }
    serve(both_ranks | alone, dist.barrier, alone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
