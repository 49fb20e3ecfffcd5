"""Conversions between whole tensors and ShardedTensors, and replicated tensors as operands of sharded ones."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchmn.bounded_cache import cached_tensors
from torchmn.context import here
from torchmn.geometry import Interval
from torchmn.gradient_role import change_role, enters, role_of
from torchmn.sharded.memory_format import empty_in_order
from torchmn.sharded.replicated import enter_shards, gather_shards, take_shard
from torchmn.sharded.sharding import FlatCut, Sharding
from torchmn.sharded.tensor import ShardedTensor, local, wrap

Given = TypeVar("Given", bound=Tensor | None)


def whole(x: ShardedTensor) -> Tensor:
    """Returns the global tensor, gathered from all ranks of `grid.tiles`, which must all call."""
    layout = x.spec
    if not layout.cut_dims:
        return local(x)
    return gather_shards(local(x), layout.grid.tiles, partial(_gather, layout), partial(_take, layout))


def gathered(x: Given) -> Given:
    """Returns the global tensor of a ShardedTensor, and any other value as it is."""
    return whole(x) if isinstance(x, ShardedTensor) else x


def shard_of(x: Tensor, layout: Sharding) -> ShardedTensor:
    """Returns this rank's shard of a whole tensor. In backward, the gradient is gathered from all ranks."""
    if not layout.cut_dims:
        return wrap(x, layout)
    shard = take_shard(x, layout.grid.tiles, partial(_gather, layout), partial(_take, layout))
    return wrap(shard, layout)


def replicated_operand(x: Tensor, layout: Sharding) -> Tensor:
    """Returns a whole tensor as an operand of shards.

    Each rank's gradient of it is only the contribution of its shard. For a parameter the optimizer sums these together
    with all other gradients; for any other tensor they are summed in backward.
    """
    if not isinstance(x, nn.Parameter):
        return enter_shards(gathered(x), layout.grid.tiles)
    role, tiles, recorder = role_of(x), layout.grid.tiles, here.recorder
    if recorder is not None:
        recorder.note_sharded_use(x)
    elif role.placement != "partial" and x.requires_grad and tiles.size > 1:
        # The dry run has not seen this use: forward takes another path since an attribute of the model changed.
        change_role(x, summed_in_backward=True)
        return enter_shards(x, tiles)
    return enter_shards(x, tiles) if role.summed_in_backward else enters(x, role)


def shard_like(x: Tensor, layout: Sharding, dims: dict[int, int]) -> Tensor:
    """Returns this rank's shard of a whole tensor, without communication. Its gradient is zero outside of the shard.

    Args:
        x: the whole tensor.
        dims: dim of `x` -> dim of `layout` as which it is cut.
    """
    for dim, layout_dim in dims.items():
        cut = layout.cuts[layout_dim]
        if cut is None or (x.shape[dim] == 1 and layout.shape[layout_dim] != 1):
            continue  # whole here, or about to be broadcast
        if isinstance(cut, FlatCut):
            x = x.index_select(dim, tile_columns(layout, layout_dim).to(x.device))
        else:
            owned = layout.interval(layout_dim)
            x = x.narrow(dim, owned.start, len(owned))
    return x


def tile_columns(layout: Sharding, dim: int, tile: int | None = None) -> Tensor:
    """Returns the global indices of a flattened image that a rank owns, in its order; this rank's by default."""
    image = layout.unflattened(dim)
    place = layout.grid.tiles.rank if tile is None else tile
    return _columns(image.shape[1:], tuple(image.interval(dim, place) for dim in range(1, len(image.shape))))


@cached_tensors(64 << 20)
def _columns(shape: tuple[int, ...], box: tuple[Interval, ...]) -> Tensor:
    """Returns the flat indices of a box of an image of `shape`."""
    everything = torch.arange(torch.Size(shape).numel()).view(shape)
    return everything[tuple(interval.as_slice() for interval in box)].reshape(-1)


def _take(layout: Sharding, x: Tensor) -> Tensor:
    """Returns a contiguous copy of this rank's shard."""
    shard, flat = x[layout.boxes[layout.grid.tiles.rank]], layout.flat_dim
    return shard.contiguous() if flat is None else shard.index_select(flat, tile_columns(layout, flat).to(x.device))


def _gather(layout: Sharding, x: Tensor) -> Tensor:
    """Returns the whole tensor of which each rank passes its shard."""
    result = empty_in_order(layout.shape, x)  # a later dropout draws its mask in the order of memory
    if x.is_meta:
        return result
    flat = layout.flat_dim
    for tile, (box, shard) in enumerate(zip(layout.boxes, layout.grid.tiles.allgather(x), strict=True)):
        if flat is None:
            result[box] = shard
        else:
            result[box].index_copy_(flat, tile_columns(layout, flat, tile).to(shard.device), shard)
    return result
