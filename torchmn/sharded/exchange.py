"""What a windowed function needs before it can compute this rank's outputs: its tile with halo and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchmn.functions.halo.exchange import halo_exchange
from torchmn.geometry import DimPlan, HaloPlan, Interval
from torchmn.sharded.refusals import refuse
from torchmn.sharded.sharding import IMAGE_AXES, AnyCut, Cut, Sharding
from torchmn.sharded.tensor import ShardedTensor, local


class Fetching(NamedTuple):
    """How to fetch what this rank needs of a layout; a plan that is used at every step is worked out once."""

    needed: tuple[int, ...]  # the last dims of the buffer
    plan: HaloPlan
    there: tuple[int, ...] | None  # the dims in the order in which ranks are numbered, if they lie otherwise
    back: tuple[int, ...]

    @staticmethod
    def of(layout: Sharding, dims: Sequence[DimPlan]) -> Fetching:
        first = min(len(layout.shape) - len(dims), *layout.cut_dims, len(layout.shape))
        every = (*(_as_it_is(layout, dim) for dim in range(first, len(layout.shape) - len(dims))), *dims)
        places = tuple(place_along(layout, dim) for dim in range(first, len(layout.shape)))
        needed = tuple(len(plan.needed[place]) for plan, place in zip(every, places, strict=True))
        order = _grid_order(layout, first)
        plan = HaloPlan.of(tuple(every[at] for at in order), tuple(places[at] for at in order))
        there = (*range(first), *(first + at for at in order))
        back = tuple(there.index(dim) for dim in range(len(there)))
        return Fetching(needed, plan, None if there == back == tuple(range(len(there))) else there, back)


def fetch(x: ShardedTensor, wanted: Sequence[DimPlan] | Fetching, fill: float = 0.0) -> Tensor:
    """The buffer in which each of the last dims holds what this rank needs by its plan, padding included."""
    layout, mine = x.spec, local(x)
    how = wanted if isinstance(wanted, Fetching) else Fetching.of(layout, wanted)
    if mine.is_meta:
        return mine.new_empty((*mine.shape[: mine.dim() - len(how.needed)], *how.needed)) + mine.sum()
    if how.there is None:
        return halo_exchange(mine, how.plan, layout.grid.tiles, fill)
    return halo_exchange(mine.permute(how.there), how.plan, layout.grid.tiles, fill).permute(how.back)


def plan_of_tile(layout: Sharding, dims: Sequence[DimPlan]) -> HaloPlan | None:
    """This rank's plan of the last dims; None where a model has transposed the image, so that ranks lie otherwise."""
    first = len(layout.shape) - len(dims)
    if any(dim < first for dim in layout.cut_dims) or _grid_order(layout, first) != list(range(len(dims))):
        return None
    return HaloPlan.of(tuple(dims), tuple(place_along(layout, dim) for dim in range(first, len(layout.shape))))


def _as_it_is(layout: Sharding, dim: int) -> DimPlan:
    """The plan of a dim of which every rank needs what it owns."""
    cut = layout.cuts[dim]
    intervals = (Interval(0, layout.shape[dim]),) if cut is None else image_cut(cut).intervals
    return DimPlan(layout.shape[dim], intervals, intervals)


def _grid_order(layout: Sharding, first: int) -> list[int]:
    """The dims from `first` on, counted from it, the cut ones among them in the order in which ranks are numbered.

    A model may have transposed the image; the grid's rows are still its rows.
    """
    order = list(range(len(layout.shape) - first))
    at = [dim - first for dim in layout.cut_dims]
    by_axis = sorted(at, key=lambda number: -IMAGE_AXES.index(image_cut(layout.cuts[first + number]).axis))
    for place, number in zip(at, by_axis, strict=True):
        order[place] = number
    return order


def image_cut(cut: AnyCut) -> Cut:
    """The cut of an image dim; a flattened image is refused."""
    if not isinstance(cut, Cut):
        refuse("a flattened image has no rows and columns any more")
    return cut


def place_along(layout: Sharding, dim: int) -> int:
    """Where this rank is along a dim."""
    cut = layout.cuts[dim]
    return 0 if cut is None else layout.place(image_cut(cut).axis)
