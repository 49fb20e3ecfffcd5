"""Rules for dropout, with the mask that one rank would draw.

Every rank draws the mask of the global batch from its generator and uses its shard of it, so all ranks need the same
seed (`torch.manual_seed` with the same number). Ranks that are threads share one generator: rank 0 draws and
broadcasts the mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.communicators.process_grid import ProcessGrid
from torchmn.sharded.memory_format import in_order, memory_order
from torchmn.sharded.redistribute import shard_like
from torchmn.sharded.refusals import refuse, refuse_in_checkpoint
from torchmn.sharded.registry import rule
from torchmn.sharded.sharding import Samples, Sharding
from torchmn.sharded.tensor import ShardedTensor, local, wrap


@rule(F.dropout)
def dropout(x: ShardedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _dropped(x, p, training, inplace, x.spec.shape[1:])


@rule(F.dropout1d, F.dropout2d, F.dropout3d)
def feature_dropout(x: ShardedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drops whole channels."""
    layout = x.spec
    return _dropped(x, p, training, inplace, (layout.shape[1], *[1] * (len(layout.shape) - 2)))


@rule(F.alpha_dropout, F.feature_alpha_dropout)
def alpha_dropout(x: ShardedTensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    if training and p > 0:
        refuse("alpha dropout in training is not supported on cut tensors. Use Dropout")
    return x


def _dropped(x: ShardedTensor, p: float, training: bool, inplace: bool, mask_shape: tuple[int, ...]) -> Tensor:
    if not 0 <= p <= 1:
        refuse(f"dropout expects a probability between 0 and 1, got {p}")
    shard = local(x)
    if not training or p == 0:
        return x
    layout = x.spec
    check_dropout(layout.grid, layout.samples, layout.is_tile)
    if shard.is_meta or p == 1:
        scale = shard.new_zeros(()) if p == 1 else shard.new_ones(())
    else:
        scale = mask_shard(layout, mask_shape, 1 - p, shard).div_(1 - p)
    if inplace:
        x.mul_(scale)
        return x
    return wrap(shard * scale, layout)


def check_dropout(grid: ProcessGrid, samples: Samples, of_image: bool) -> None:
    """Raises a ParallelizeError where the mask would differ from that of one rank.

    That is so if the samples are unknown, and in a recomputation of vectors, which unlike images do not store their
    samples.
    """
    if not samples.known:
        refuse(
            "dropout in evaluation mode: ranks along 'data' have different samples, and exchange batch sizes, on which "
            "their parts of the mask depend, in training only. Call model.train(), or use a grid without the axis data"
        )
    if (grid.sizes["data"] > 1 and not of_image) or (grid.comm.traits.shares_process and grid.comm.size > 1):
        refuse_in_checkpoint("dropout")


def mask_shard(layout: Sharding, mask_shape: tuple[int, ...], probability: float, like: Tensor) -> Tensor:
    """Returns this rank's shard of the mask of ones and zeros that one rank draws for (global batch, *mask_shape).

    Args:
        layout: the sharding of the tensor.
        mask_shape: (channel, *image), with 1 where the mask is the same for all elements of a dim.
        probability: of a one.
        like: the tensor, for dtype, device and memory format.
    """
    comm, samples = layout.grid.comm, layout.samples
    if layout.grid.sizes["data"] == 1:
        samples = Samples(0, layout.shape[0])  # the model may have selected some samples of the batch
    elif samples.start + layout.shape[0] > samples.total:
        refuse(f"dropout expects the batch as its first dim, to cut the mask of the global batch; got {layout}")
    drawn: Any = None
    if not comm.traits.shares_process or comm.rank == 0:
        per_element = tuple(mask_shape) == layout.shape[1:]
        drawn = _draw((samples.total, *mask_shape), probability, like, per_element)
    if comm.traits.shares_process and comm.size > 1:
        drawn = comm.bcast(drawn)
    of_samples = drawn.narrow(0, samples.start, layout.shape[0])
    return shard_like(of_samples, layout, {dim: dim for dim in range(1, len(layout.shape))}).clone()


def _draw(shape: tuple[int, ...], probability: float, like: Tensor, per_element: bool) -> Tensor:
    """Returns a mask of `shape`, drawn in the memory format of `like` if it has an entry per element.

    In some releases of torch, such as 2.13, a transposed or channels_last tensor gets another mask than a contiguous
    one; in others, such as 2.6, the same.
    """
    order = memory_order(like) if per_element else range(len(shape))
    empty = torch.empty([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
    return in_order(empty, order).bernoulli_(probability)
