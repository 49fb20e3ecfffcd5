"""Differentiable mean over the elements of all ranks: a loss for losses of single pixels or samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import Function
from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError


@uncompiled
def global_mean(values: Tensor, grid: ProcessGrid | Communicator) -> Tensor:
    """Returns the mean over the elements of all ranks' `values`, on every rank.

    Differentiable: each rank calls backward on the result, and the mean counts once, as the loss of one process. The
    gradient of an element is that of the mean, divided by the number of elements of all ranks (and multiplied by the
    number of data replicas of the grid, over which the multi-node optimizer averages).

    Args:
        values: floating-point tensor of any shape, such as the loss of each pixel of this rank's tile. Shapes may
            differ between ranks. All elements have the same weight; a rank without elements takes part, too.
        grid: process grid or communicator whose ranks take part; all of them must call.

    Returns:
        A 0-d tensor of the dtype of `values`.

    Raises:
        ArgumentError: for arguments of other types.
        MismatchError: on every rank, if dtypes differ or a rank calls another operation.
    """
    given: Any = grid
    if isinstance(given, Communicator):
        return _GlobalMean.apply(values, given, 1)
    if not isinstance(given, ProcessGrid):
        raise ArgumentError(f"global_mean: expected a ProcessGrid or a communicator, got {arguments.describe(grid)}")
    # The multi-node optimizer averages over data replicas, assuming that each has the loss of its samples. This is
    # the loss of all samples, so the gradient of each replica must count as often as there are replicas.
    return _GlobalMean.apply(values, given.comm, given.sizes["data"])


class _GlobalMean(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator, gradient_factor: int) -> Tensor:
        problem = arguments.tensor_problem(values)
        if problem is None and not values.is_floating_point():
            problem = f"expected floating-point values, got {values.dtype}"
        with comm.agreed("global_mean", problem, dtype=None if problem else values.dtype):
            # In double precision the order of the ranks in the sum does not matter.
            total = values.sum(dtype=torch.float64)
            total, count = comm.allreduce(torch.stack([total, total.new_tensor(values.numel())]), in_place=True)
        ctx.comm, ctx.shape, ctx.count, ctx.gradient_factor = comm, values.shape, float(count), gradient_factor
        return (total / count).to(values.dtype)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _SpreadGradient.apply(grads[0] * ctx.gradient_factor, ctx.comm, ctx.shape, ctx.count), None, None


class _SpreadGradient(Function):
    """The gradient of each element from the gradient of the mean. Its adjoint, for second derivatives, is the mean."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, comm: Communicator, shape: torch.Size, count: float) -> Tensor:
        ctx.comm = comm
        return (g / count).expand(shape)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _GlobalMean.apply(grads[0], ctx.comm, 1), None, None, None
