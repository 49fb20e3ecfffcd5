"""global_mean: the mean over values that lie on many ranks, as one loss that counts once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError


@uncompiled
def global_mean(values: Tensor, grid: ProcessGrid | Communicator) -> Tensor:
    """The mean over the elements of all ranks' `values`, the same 0-d tensor on every rank.

    values: any shape, another one on each rank too, such as the loss of each pixel of this rank's tile. Every element
    counts alike; a rank without any takes part.

    Differentiable: every rank calls backward on the result, and it counts once, as the serial loss: the gradient of
    each element is that of the mean over the number of elements of all ranks (times the number of data replicas of the
    grid, over which the multi-node optimizer takes the mean).
    """
    if not isinstance(grid, ProcessGrid | Communicator):
        raise ArgumentError(f"global_mean: expected a ProcessGrid or a communicator, got {arguments.describe(grid)}")
    if not isinstance(grid, ProcessGrid):
        return _GlobalMean.apply(values, grid, 1)  # type: ignore[return-value]
    # The multi-node optimizer takes the mean over data replicas, each of which stands for the loss of its own samples.
    # This loss is that of all samples already, so each replica's gradient must count as often as there are replicas.
    return _GlobalMean.apply(values, grid.comm, grid.sizes["data"])  # type: ignore[return-value]


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator, gradient_counts: int) -> Tensor:
        problem = arguments.tensor_problem(values)
        if problem is None and not values.is_floating_point():
            problem = f"expected floating-point values, got {values.dtype}"
        with comm.agreed("global_mean", problem, dtype=None if problem else values.dtype):
            # In double precision: then the order in which ranks add up does not show.
            total = values.sum(dtype=torch.float64)
            total, count = comm.allreduce(torch.stack([total, total.new_tensor(values.numel())]), in_place=True)
        ctx.comm, ctx.shape, ctx.count, ctx.gradient_counts = comm, values.shape, float(count), gradient_counts
        return (total / count).to(values.dtype)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Shares.apply(grads[0] * ctx.gradient_counts, ctx.comm, ctx.shape, ctx.count), None, None


class _Shares(torch.autograd.Function):
    """Each element's share of the mean's gradient. Its own backward sums over ranks again, for second derivatives."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, comm: Communicator, shape: torch.Size, count: float) -> Tensor:
        ctx.comm = comm
        return (g / count).expand(shape)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _GlobalMean.apply(grads[0], ctx.comm, 1), None, None, None
