"""The halo exchange of a sharded tensor: `fetch` returns this rank's tile with its halo and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchmn.functions.halo.exchange import halo_exchange
from torchmn.geometry import DimPlan, HaloPlan, Interval
from torchmn.sharded.refusals import refuse
from torchmn.sharded.sharding import IMAGE_AXES, AnyCut, Cut, Sharding
from torchmn.sharded.tensor import ShardedTensor, local


class FetchPlan(NamedTuple):
    """The halo exchange of one sharding, computed once and used in every step.

    Attributes:
        needed: the last dims of the buffer.
        plan: of the dims in the order of the grid's axes.
        to_grid_order: the permutation to that order; None if the dims have it already.
        from_grid_order: the inverse permutation.
    """

    needed: tuple[int, ...]
    plan: HaloPlan
    to_grid_order: tuple[int, ...] | None
    from_grid_order: tuple[int, ...]

    @staticmethod
    def of(layout: Sharding, dims: Sequence[DimPlan]) -> FetchPlan:
        """Returns the plan for fetching what `dims`, plans of the last dims, need."""
        first = min(len(layout.shape) - len(dims), *layout.cut_dims, len(layout.shape))
        every = (*(_only_owned(layout, dim) for dim in range(first, len(layout.shape) - len(dims))), *dims)
        places = tuple(place_along(layout, dim) for dim in range(first, len(layout.shape)))
        needed = tuple(len(plan.needed[place]) for plan, place in zip(every, places, strict=True))
        order = _grid_order(layout, first)
        plan = HaloPlan.of(tuple(every[at] for at in order), tuple(places[at] for at in order))
        permutation = (*range(first), *(first + at for at in order))
        inverse = tuple(permutation.index(dim) for dim in range(len(permutation)))
        in_order = permutation == tuple(range(len(permutation)))
        return FetchPlan(needed, plan, None if in_order else permutation, inverse)


def fetch(x: ShardedTensor, wanted: Sequence[DimPlan] | FetchPlan, fill: float = 0.0) -> Tensor:
    """Returns this rank's tile with its halo and padding. Communicates with the ranks of `grid.tiles`.

    Args:
        wanted: the plans of the last dims, or a `FetchPlan` made of them.
        fill: the value of padding.
    """
    layout, tile = x.spec, local(x)
    how = wanted if isinstance(wanted, FetchPlan) else FetchPlan.of(layout, wanted)
    if tile.is_meta:
        return tile.new_empty((*tile.shape[: tile.dim() - len(how.needed)], *how.needed)) + tile.sum()
    if how.to_grid_order is None:
        return halo_exchange(tile, how.plan, layout.grid.tiles, fill)
    buffer = halo_exchange(tile.permute(how.to_grid_order), how.plan, layout.grid.tiles, fill)
    return buffer.permute(how.from_grid_order)


def plan_of_tile(layout: Sharding, dims: Sequence[DimPlan]) -> HaloPlan | None:
    """Returns this rank's halo plan of the last dims; None if the image was transposed, so that axes are swapped."""
    first = len(layout.shape) - len(dims)
    if any(dim < first for dim in layout.cut_dims) or _grid_order(layout, first) != list(range(len(dims))):
        return None
    return HaloPlan.of(tuple(dims), tuple(place_along(layout, dim) for dim in range(first, len(layout.shape))))


def _only_owned(layout: Sharding, dim: int) -> DimPlan:
    """Returns the plan of a dim without a halo: every rank needs what it owns."""
    cut = layout.cuts[dim]
    intervals = (Interval(0, layout.shape[dim]),) if cut is None else image_cut(cut).intervals
    return DimPlan(layout.shape[dim], intervals, intervals)


def _grid_order(layout: Sharding, first: int) -> list[int]:
    """Returns the dims from `first` on, counted from it, with the cut ones in the order of the grid's axes.

    They differ from 0, 1, ... if the model has transposed the image.
    """
    order = list(range(len(layout.shape) - first))
    at = [dim - first for dim in layout.cut_dims]
    by_axis = sorted(at, key=lambda number: -IMAGE_AXES.index(image_cut(layout.cuts[first + number]).axis))
    for place, number in zip(at, by_axis, strict=True):
        order[place] = number
    return order


def image_cut(cut: AnyCut) -> Cut:
    """Returns the cut of an image dim.

    Raises:
        ParallelizeError: if the image is flattened.
    """
    if not isinstance(cut, Cut):
        refuse("expected an image, got a flattened one, which has no rows and columns")
    return cut


def place_along(layout: Sharding, dim: int) -> int:
    """Returns this rank's place along a dim."""
    cut = layout.cuts[dim]
    return 0 if cut is None else layout.place(image_cut(cut).axis)
