"""MultiNodeBatchNorm1d, 2d, 3d: batch normalisation with the statistics of the batches of all ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from torchmn._torch_compat import BatchNorm
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.functions.moments import Moments, accumulator, local_moments, normalize_over_ranks, track_statistics, union


class MultiNodeBatchNorm(BatchNorm):
    """Batch normalisation of the concatenated batches of all ranks of `comm` (elsewhere: SyncBatchNorm).

    Outputs, gradients and running statistics are those of torch's layer on the concatenated batch. Use
    MultiNodeBatchNorm1d, 2d or 3d, which are also subclasses of torch's layers. In training, every rank must call the
    layer, and run backward through it, equally often. Local batches may differ in size, and may be empty, of shape
    (0, channel, ...). Forward needs one all-gather, backward one all-reduce.

    The loss is the sum of the losses of all ranks: the gradient of the input is that of this sum; the gradients of
    weight and bias are this rank's contributions, to be summed over ranks like those of any other layer. So a local
    loss of `sum over this rank's samples * comm.size / size of the global batch`, followed by the mean of gradients
    over ranks, gives the gradients of the mean loss of the global batch.

    In evaluation mode there is no communication: running statistics are used or, if there are none, those of the local
    batch. A deep copy uses the same communicator. The keys of `state_dict` are those of torch's layer.

    Args:
        num_features: the number of channels.
        comm: the ranks over whose batches to normalise.
        eps: added to the variance.
        momentum: of the running statistics; None for the mean of all batches.
        affine: whether to have a weight and a bias per channel.
        track_running_stats: whether to keep running statistics.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        **options: of torch's layer in its newer releases.

    Raises:
        ArgumentError: in forward, on every rank, if inputs or settings differ between ranks or do not suit the layer.
    """

    # The gradient of the input depends on the losses of other ranks, so an optimizer that weights ranks must scale the
    # losses before backward; scaling the gradients afterwards would be wrong.
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
        **options: Any,  # arguments that newer versions of torch have, such as bias=False
    ):
        comm = as_communicator(comm, type(self).__name__)
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
            same |= {"dtype": x.dtype, "gradients for": self._gradients_needed(x)}
        with comm.agreed(type(self).__name__, problem, **same), torch.no_grad():
            packed = local_moments(x.to(accumulator(x.dtype))).packed()
            return union([Moments.unpacked(part) for part in comm.allgather(packed)])

    def _input_problem(self, x: object) -> str | None:
        """Returns the error of torch's layer for this input, which it would raise on this rank only."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return f"expected a floating-point tensor, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}"
        try:
            self._check_input_dim(x)
        except ValueError as error:
            return str(error)
        if x.shape[1] != self.num_features:
            return f"expected {self.num_features} channels, got input size {tuple(x.shape)}"
        return None

    def _gradients_needed(self, x: Tensor) -> str:
        """Returns what backward computes. It must be the same on all ranks, since backward communicates."""
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
        """Updates the running statistics with those of the global batch."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # the mean of all batches so far
                factor = 1.0 / float(self.num_batches_tracked)
        assert factor is not None  # num_batches_tracked exists where running statistics do
        track_statistics(self.running_mean, self.running_var, moments, factor)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeBatchNorm:
        memo[id(self.comm)] = self.comm
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = deepcopy(self.__dict__, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "comm": None}  # a communicator cannot be pickled


class MultiNodeBatchNorm1d(MultiNodeBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the batches of all ranks; see `MultiNodeBatchNorm`.

    input: (batch, channel) or (batch, channel, length), this rank's batch.
    """


class MultiNodeBatchNorm2d(MultiNodeBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the batches of all ranks; see `MultiNodeBatchNorm`.

    input: (batch, channel, height, width), this rank's batch.
    """


class MultiNodeBatchNorm3d(MultiNodeBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over the batches of all ranks; see `MultiNodeBatchNorm`.

    input: (batch, channel, depth, height, width), this rank's batch.
    """


# torch calls the forward of the lazy class the first time, although the module has the other class by then.


class LazyMultiNodeBatchNorm1d(MultiNodeBatchNorm1d, nn.LazyBatchNorm1d):
    """`nn.LazyBatchNorm1d` over the batches of all ranks; made by `create_mnbn_model`."""

    cls_to_become = MultiNodeBatchNorm1d


class LazyMultiNodeBatchNorm2d(MultiNodeBatchNorm2d, nn.LazyBatchNorm2d):
    """`nn.LazyBatchNorm2d` over the batches of all ranks; made by `create_mnbn_model`."""

    cls_to_become = MultiNodeBatchNorm2d


class LazyMultiNodeBatchNorm3d(MultiNodeBatchNorm3d, nn.LazyBatchNorm3d):
    """`nn.LazyBatchNorm3d` over the batches of all ranks; made by `create_mnbn_model`."""

    cls_to_become = MultiNodeBatchNorm3d
