"""create_multi_node_optimizer: the line that makes a training script distributed."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ArgumentError
from torchmn.optim.checks import check
from torchmn.optim.multi_node import MultiNodeOptimizer
from torchmn.optim.reducers import Delayed, Immediate, Overlapped


def create_multi_node_optimizer(
    actual_optimizer: Optimizer,
    comm: Communicator | ProcessGrid,
    *,
    model: nn.Module | None = None,
    double_buffering: bool = False,
    overlap: bool = False,
    zero_fill: bool = True,
    grad_dtype: torch.dtype | None = None,
) -> MultiNodeOptimizer:
    """`actual_optimizer`, stepping with the mean of all ranks' gradients. Every rank must call it.

    comm: all ranks that train together, or the grid of a parallel model.
    Rank 0's parameters reach all ranks now, and with `model` its buffers too.
    double_buffering: step k applies the gradients of step k-1 while those of k travel; `flush()` at the end.
    overlap: gradients travel while backward computes: worth a try on a network or with GPUs; the numbers are the same.
    zero_fill: a gradient that only some ranks have counts as zeros on the others; False makes it an error.
    grad_dtype: torch.float16 or torch.bfloat16 to send gradients compressed; they are summed in float32.
    """
    if isinstance(comm, ProcessGrid):
        comm = comm.comm
    if not isinstance(comm, Communicator):
        raise ArgumentError(f"create_multi_node_optimizer: expected a communicator, got {type(comm).__name__}")
    options = {
        "double_buffering": bool(double_buffering),
        "overlap": bool(overlap),
        "zero_fill": bool(zero_fill),
        "grad_dtype": comm.settings.grad_dtype if grad_dtype is None else grad_dtype,
    }
    check(actual_optimizer, comm, model, options)
    reducer = Delayed if double_buffering else Overlapped if overlap else Immediate
    return MultiNodeOptimizer(actual_optimizer, comm, model, zero_fill, grad_dtype, reducer)
