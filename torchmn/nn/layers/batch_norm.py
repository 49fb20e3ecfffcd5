"""Batch normalisation over the batch of all ranks: the numbers of ordinary BatchNorm on the concatenated batch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from torchmn._torch_compat import BatchNorm
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.functions.moments import Moments, accumulator, local_moments, normalize_over_ranks, track_statistics, union


class MultiNodeBatchNorm(BatchNorm):
    """Batch normalisation of the concatenated batch of all ranks of `comm`: outputs, gradients, running statistics.

    Use MultiNodeBatchNorm1d, 2d or 3d; each is also torch's layer of its dimension. In training, every rank must
    call the layer, and run backward through it, equally often; local batches may differ in size, and some may be
    empty, of shape (0, channel, ...). Forward sends one message, backward one.

    Gradients follow the convention that the loss is the sum over ranks of the local losses: the gradient of the
    input is that of this sum; those of weight and bias are this rank's part, to be summed over ranks as those of
    any other layer. So a local loss of `sum over this rank's samples * comm.size / samples of the whole batch`,
    followed by the mean of gradients over ranks, gives the gradients of the mean loss of the whole batch.

    In eval mode nothing is communicated: running statistics are used or, where there are none, those of the local
    batch. A deep copy talks to the same ranks. The keys of `state_dict` are those of torch's layer.
    """

    # The input's gradient depends on the other ranks' losses. Weights on these losses must therefore be applied
    # before backward: weighing the gradients of ranks afterwards is too late.
    gradients_cross_ranks = True

    comm: Communicator | None

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,  # what newer versions of torch add, such as bias=False
    ):
        if not isinstance(comm, Communicator):
            raise ArgumentError(f"{type(self).__name__}: expected comm to be a communicator, got {comm!r}")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.comm = comm

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name: callers may pass it by keyword)
        if not self.training:
            return super().forward(input)
        if self.comm is None:
            raise ArgumentError(f"{type(self).__name__} was unpickled and has no communicator: assign one to its .comm")
        moments = self._moments_of_all_ranks(self.comm, input)
        self._check_count(self.comm, input, moments.count)
        self._track(moments)
        return normalize_over_ranks(input, self.weight, self.bias, moments, self.eps, self.comm)

    @uncompiled
    def _moments_of_all_ranks(self, comm: Communicator, x: Tensor) -> Moments:
        problem = self._input_problem(x)
        same = {"num_features": self.num_features, "eps": self.eps, "momentum": self.momentum}
        if problem is None:
            same |= {"dtype": x.dtype, "gradients for": self._gradients_asked_for(x)}
        with comm.agreed(type(self).__name__, problem, **same), torch.no_grad():
            mine = local_moments(x.to(accumulator(x.dtype))).packed()
            return union([Moments.unpacked(part) for part in comm.allgather(mine)])

    def _input_problem(self, x: object) -> str | None:
        """What is wrong with the input, where torch's layer would raise on this rank alone."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return f"expected a floating-point tensor, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}"
        try:
            self._check_input_dim(x)
        except ValueError as error:
            return str(error)
        if x.shape[1] != self.num_features:
            return f"expected {self.num_features} channels, got input size {tuple(x.shape)}"
        return None

    def _gradients_asked_for(self, x: Tensor) -> str:
        """A rank whose backward does not come through this layer would leave the others waiting: all must agree."""
        if not torch.is_grad_enabled():
            return "nothing"
        if x.requires_grad:
            return "the input"
        wanted = any(p is not None and p.requires_grad for p in (self.weight, self.bias))
        return "the parameters" if wanted else "nothing"

    def _check_count(self, comm: Communicator, x: Tensor, count: float) -> None:
        if count == 1:
            raise ArgumentError(
                f"rank {comm.rank} of {comm.size}: {type(self).__name__}: Expected more than 1 value per channel when "
                f"training, got 1 over all ranks together, input size here {x.shape}"
            )

    @torch.no_grad()
    def _track(self, moments: Moments) -> None:
        """Move the running statistics towards those of the whole batch."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:  # the plain mean of all batches so far
            factor = 1.0 / float(self.num_batches_tracked)  # type: ignore[arg-type]
        track_statistics(self.running_mean, self.running_var, moments, factor)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeBatchNorm:
        memo[id(self.comm)] = self.comm
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = deepcopy(self.__dict__, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "comm": None}  # a communicator is this process's alone


class MultiNodeBatchNorm1d(MultiNodeBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the batches of all ranks, as `MultiNodeBatchNorm` says.

    input: (batch, channel) or (batch, channel, length), this rank's part of the batch.
    """


class MultiNodeBatchNorm2d(MultiNodeBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the batches of all ranks, as `MultiNodeBatchNorm` says.

    input: (batch, channel, height, width), this rank's part of the batch.
    """


class MultiNodeBatchNorm3d(MultiNodeBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over the batches of all ranks, as `MultiNodeBatchNorm` says.

    input: (batch, channel, depth, height, width), this rank's part of the batch.
    """
