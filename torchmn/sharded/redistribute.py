"""Between whole tensors and ShardedTensors: cutting, gathering, and values that enter a computation on parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchmn.communicators.bounded_cache import remembered_tensors
from torchmn.functions.replicated import enter_parts, part_of_whole, whole_of_parts
from torchmn.geometry import Interval
from torchmn.gradient_role import change_role, enters, is_expected, role_of
from torchmn.sharded import roles
from torchmn.sharded.memory import empty_in_order
from torchmn.sharded.sharding import Cut, FlatCut, Sharding
from torchmn.sharded.tensor import ShardedTensor, local, wrap

Given = TypeVar("Given", bound=Tensor | None)


def whole(x: ShardedTensor) -> Tensor:
    """The global tensor of which every rank of `grid.tiles` holds a part."""
    layout = x.spec
    if not layout.cut_dims:
        return local(x)
    return whole_of_parts(local(x), layout.grid.tiles, _gather(layout), _take(layout))


def gathered(x: Given) -> Given:
    """`x`, whole: a weight that a model computes from cut values is needed on all ranks."""
    return whole(x) if isinstance(x, ShardedTensor) else x  # type: ignore[return-value]


def part_of(x: Tensor, layout: Sharding) -> ShardedTensor:
    """This rank's part of a whole tensor; its gradient is put together from all ranks' parts."""
    if not layout.cut_dims:
        return wrap(x, layout)
    return wrap(part_of_whole(x, layout.grid.tiles, _gather(layout), _take(layout)), layout)


def entering(x: Tensor, layout: Sharding) -> Tensor:
    """A whole tensor as an operand of parts.

    Each rank's share of its gradient comes from its own part only. A parameter keeps that share, and the optimizer
    sums it together with all others; anything else is summed in backward.
    """
    if not isinstance(x, nn.Parameter):
        return enter_parts(gathered(x), layout.grid.tiles)
    recorder = roles.recorder()
    if recorder is not None:
        recorder.note_part_use(x)
    elif not is_expected(x, layout.grid.tiles.size):
        change_role(x, summed_in_backward=True)
    if role_of(x).summed_in_backward:
        return enter_parts(x, layout.grid.tiles)
    return enters(x)


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


def _take(layout: Sharding) -> Callable[[Tensor], Tensor]:
    def take(x: Tensor) -> Tensor:
        return cut_like(x, layout, {dim: dim for dim in layout.cut_dims}).contiguous()

    return take


def _gather(layout: Sharding) -> Callable[[Tensor], Tensor]:
    def gather(x: Tensor) -> Tensor:
        result = empty_in_order(layout.shape, x)  # dropout behind it draws in the order of memory
        if x.is_meta:
            return result
        for tile, part in enumerate(layout.grid.tiles.allgather(x)):
            _put(result, part, layout, tile)
        return result

    return gather


def _put(result: Tensor, part: Tensor, layout: Sharding, tile: int) -> None:
    """Write a tile's part to its place in the whole."""
    cuts = enumerate(layout.cuts)
    place = tuple(layout.interval(dim, tile).as_slice() if isinstance(cut, Cut) else slice(None) for dim, cut in cuts)
    flat = [dim for dim in layout.cut_dims if isinstance(layout.cuts[dim], FlatCut)]
    if flat:
        (dim,) = flat  # reshaping makes no second one
        result[place].index_copy_(dim, own_columns(layout, dim, tile).to(part.device), part)
    else:
        result[place] = part
