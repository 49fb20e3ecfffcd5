"""Between whole tensors and ShardedTensors: cutting, gathering, and values that enter a computation on parts."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchmn.bounded_cache import remembered_tensors
from torchmn.context import here
from torchmn.geometry import Interval
from torchmn.gradient_role import change_role, enters, role_of
from torchmn.sharded.memory import empty_in_order
from torchmn.sharded.replicated import enter_parts, part_of_whole, whole_of_parts
from torchmn.sharded.sharding import FlatCut, Sharding
from torchmn.sharded.tensor import ShardedTensor, local, wrap

Given = TypeVar("Given", bound=Tensor | None)


def whole(x: ShardedTensor) -> Tensor:
    """The global tensor of which every rank of `grid.tiles` holds a part."""
    layout = x.spec
    if not layout.cut_dims:
        return local(x)
    return whole_of_parts(local(x), layout.grid.tiles, partial(_gather, layout), partial(_take, layout))


def gathered(x: Given) -> Given:
    """`x`, whole: a weight that a model computes from cut values is needed on all ranks."""
    return whole(x) if isinstance(x, ShardedTensor) else x  # type: ignore[return-value]


def part_of(x: Tensor, layout: Sharding) -> ShardedTensor:
    """This rank's part of a whole tensor; its gradient is put together from all ranks' parts."""
    if not layout.cut_dims:
        return wrap(x, layout)
    part = part_of_whole(x, layout.grid.tiles, partial(_gather, layout), partial(_take, layout))
    return wrap(part, layout)


def entering(x: Tensor, layout: Sharding) -> Tensor:
    """A whole tensor as an operand of parts.

    Each rank's share of its gradient comes from its own part only. A parameter keeps that share, and the optimizer
    sums it together with all others; anything else is summed in backward.
    """
    if not isinstance(x, nn.Parameter):
        return enter_parts(gathered(x), layout.grid.tiles)
    role, tiles, recorder = role_of(x), layout.grid.tiles, here.recorder
    if recorder is not None:
        recorder.note_part_use(x)
    elif role.placement != "partial" and x.requires_grad and tiles.size > 1:
        # The dry run has not seen this use: forward takes another way since an attribute of the model has changed.
        change_role(x, summed_in_backward=True)
        return enter_parts(x, tiles)
    return enter_parts(x, tiles) if role.summed_in_backward else enters(x, role)


def cut_like(x: Tensor, layout: Sharding, dims: dict[int, int]) -> Tensor:
    """A whole tensor, cut in its own dims (the keys) as `layout` is in its dims (the values); no communication.

    The gradient is this rank's share: zeros outside of the cut.
    """
    for dim, layout_dim in dims.items():
        cut = layout.cuts[layout_dim]
        if cut is None or (x.shape[dim] == 1 and layout.shape[layout_dim] != 1):
            continue  # whole here, or about to be broadcast
        if isinstance(cut, FlatCut):
            x = x.index_select(dim, own_columns(layout, layout_dim).to(x.device))
        else:
            mine = layout.interval(layout_dim)
            x = x.narrow(dim, mine.start, len(mine))
    return x


def own_columns(layout: Sharding, dim: int, tile: int | None = None) -> Tensor:
    """The global indices of a flattened image's dim that a rank owns, in the order in which it holds them."""
    image = layout.unflattened(dim)
    place = layout.grid.tiles.rank if tile is None else tile
    return _columns(image.shape[1:], tuple(image.interval(dim, place) for dim in range(1, len(image.shape))))


@remembered_tensors(64 << 20)
def _columns(shape: tuple[int, ...], mine: tuple[Interval, ...]) -> Tensor:
    """The flat indices of a box of an image; not of its batch, which may have another size each time."""
    everything = torch.arange(torch.Size(shape).numel()).view(shape)
    return everything[tuple(interval.as_slice() for interval in mine)].reshape(-1)


def _take(layout: Sharding, x: Tensor) -> Tensor:
    """This rank's part of a whole tensor, in memory of its own."""
    part, flat = x[layout.boxes[layout.grid.tiles.rank]], layout.flat_dim
    return part.contiguous() if flat is None else part.index_select(flat, own_columns(layout, flat).to(x.device))


def _gather(layout: Sharding, x: Tensor) -> Tensor:
    """The whole tensor of which each rank has passed its part."""
    result = empty_in_order(layout.shape, x)  # dropout behind it draws in the order of memory
    if x.is_meta:
        return result
    flat = layout.flat_dim
    for tile, (box, part) in enumerate(zip(layout.boxes, layout.grid.tiles.allgather(x), strict=True)):
        if flat is None:
            result[box] = part
        else:
            result[box].index_copy_(flat, own_columns(layout, flat, tile).to(part.device), part)
    return result
