"""Dropout: the mask of the serial run, cut.

Every rank draws the mask of the whole batch from its own generator, as the serial run would, and keeps its part.
Ranks must therefore have the same seed, as they have after `torch.manual_seed` with the same number. Ranks that are
threads share one generator: there rank 0 draws and hands the mask out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.communicators.process_grid import ProcessGrid
from torchmn.sharded.memory import in_order, memory_order
from torchmn.sharded.redistribute import cut_like
from torchmn.sharded.refusals import refuse, refuse_in_checkpoint
from torchmn.sharded.registry import rule
from torchmn.sharded.sharding import Samples, Sharding
from torchmn.sharded.tensor import ShardedTensor, local, wrap


@rule(F.dropout)
def dropout(x: ShardedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _dropped(x, p, training, inplace, x.spec.shape[1:])


@rule(F.dropout1d, F.dropout2d, F.dropout3d)
def feature_dropout(x: ShardedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Whole channels at once."""
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
    mine = local(x)
    if not training or p == 0:
        return x
    layout = x.spec
    check_dropout(layout.grid, layout.samples, layout.is_tile)
    if mine.is_meta or p == 1:
        kept = mine.new_zeros(()) if p == 1 else mine.new_ones(())
    else:
        kept = part_of_mask(layout, mask_shape, 1 - p, mine).div_(1 - p)
    if inplace:
        x.mul_(kept)
        return x
    return wrap(mine * kept, layout)


def check_dropout(grid: ProcessGrid, samples: Samples, of_image: bool) -> None:
    """Refuse dropout where the mask would be another one than one process draws.

    So it is in a recomputation (an image knows its samples, vectors do not), and where the samples are not known.
    """
    if not samples.known:
        refuse(
            "dropout while the model evaluates: each rank along 'data' has samples of its own, and which part of the "
            "mask is theirs is asked in training only. Call model.train(), or use a grid without the axis data"
        )
    if (grid.sizes["data"] > 1 and not of_image) or (grid.comm.traits.shares_process and grid.comm.size > 1):
        refuse_in_checkpoint("dropout")


def part_of_mask(layout: Sharding, mask_shape: tuple[int, ...], probability: float, like: Tensor) -> Tensor:
    """This rank's part of the mask that the serial run draws for (total samples, *mask_shape)."""
    comm, samples = layout.grid.comm, layout.samples
    if layout.grid.sizes["data"] == 1:
        samples = Samples(0, layout.shape[0])  # the model may have taken some samples of the batch
    elif samples.start + layout.shape[0] > samples.total:
        refuse(f"dropout expects the batch as its first dim, to cut the mask of the whole batch; got {layout}")
    drawn: Any = None
    if not comm.traits.shares_process or comm.rank == 0:
        of_elements = tuple(mask_shape) == layout.shape[1:]
        drawn = _drawn((samples.total, *mask_shape), probability, like, of_elements)
    if comm.traits.shares_process and comm.size > 1:
        drawn = comm.bcast(drawn)
    mine = drawn.narrow(0, samples.start, layout.shape[0])
    return cut_like(mine, layout, {dim: dim for dim in range(1, len(layout.shape))}).clone()


def _drawn(shape: tuple[int, ...], probability: float, like: Tensor, of_elements: bool) -> Tensor:
    """A mask of `shape`; one `of_elements` lies in memory as those of `like` do.

    It must before it is drawn: for some releases of torch, such as 2.13, the mask of a transposed or channels_last
    tensor is not that of a contiguous one, and for others, such as 2.6, it is.
    """
    order = memory_order(like) if of_elements else range(len(shape))
    empty = torch.empty([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
    return in_order(empty, order).bernoulli_(probability)
