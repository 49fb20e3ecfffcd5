"""What a windowed function needs before it can compute this rank's outputs: its tile with halo and padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.functions.halo_exchange import halo_exchange
from torchmn.geometry import DimPlan, HaloPlan, Interval, Window, all_owned
from torchmn.nn.parts.layout import IMAGE_AXES, AnyCut, Cut, Layout
from torchmn.nn.parts.part import Part, local
from torchmn.nn.parts.refusals import refuse, where


class Fetching(NamedTuple):
    """How to fetch what this rank needs of a layout; a plan that is used at every step is worked out once."""

    needed: tuple[int, ...]  # the last dims of the buffer
    plan: HaloPlan
    there: tuple[int, ...] | None  # the dims in the order in which ranks are numbered, if they lie otherwise
    back: tuple[int, ...]

    @staticmethod
    def of(layout: Layout, dims: Sequence[DimPlan]) -> Fetching:
        first = min(len(layout.shape) - len(dims), *layout.cut_dims, len(layout.shape))
        every = (*(_as_it_is(layout, dim) for dim in range(first, len(layout.shape) - len(dims))), *dims)
        places = tuple(_place(layout, dim) for dim in range(first, len(layout.shape)))
        needed = tuple(len(plan.needed[place]) for plan, place in zip(every, places, strict=True))
        order = _grid_order(layout, first)
        plan = HaloPlan.of(tuple(every[at] for at in order), tuple(places[at] for at in order))
        there = (*range(first), *(first + at for at in order))
        back = tuple(there.index(dim) for dim in range(len(there)))
        return Fetching(needed, plan, None if there == back == tuple(range(len(there))) else there, back)


def fetch(x: Part, wanted: Sequence[DimPlan] | Fetching, fill: float = 0.0) -> Tensor:
    """The buffer in which each of the last dims holds what this rank needs by its plan, padding included."""
    layout, mine = x.layout_, local(x)
    how = wanted if isinstance(wanted, Fetching) else Fetching.of(layout, wanted)
    if mine.is_meta:
        return mine.new_empty((*mine.shape[: mine.dim() - len(how.needed)], *how.needed)) + mine.sum()
    if how.there is None:
        return halo_exchange(mine, how.plan, layout.grid.tiles, fill)
    return halo_exchange(mine.permute(how.there), how.plan, layout.grid.tiles, fill).permute(how.back)


def plan_of_tile(layout: Layout, dims: Sequence[DimPlan]) -> HaloPlan | None:
    """This rank's plan of the last dims; None where a model has transposed the image, so that ranks lie otherwise."""
    first = len(layout.shape) - len(dims)
    if any(dim < first for dim in layout.cut_dims) or _grid_order(layout, first) != list(range(len(dims))):
        return None
    return HaloPlan.of(tuple(dims), tuple(_place(layout, dim) for dim in range(first, len(layout.shape))))


def _as_it_is(layout: Layout, dim: int) -> DimPlan:
    """The plan of a dim of which every rank needs what it owns."""
    cut = layout.cuts[dim]
    intervals = (Interval(0, layout.shape[dim]),) if cut is None else _images(cut).intervals
    return DimPlan(layout.shape[dim], intervals, intervals)


def _grid_order(layout: Layout, first: int) -> list[int]:
    """The dims from `first` on, counted from it, the cut ones among them in the order in which ranks are numbered.

    A model may have transposed the image; the grid's rows are still its rows.
    """
    order = list(range(len(layout.shape) - first))
    at = [dim - first for dim in layout.cut_dims]
    by_axis = sorted(at, key=lambda number: -IMAGE_AXES.index(_images(layout.cuts[first + number]).axis))
    for place, number in zip(at, by_axis, strict=True):
        order[place] = number
    return order


def _images(cut: AnyCut) -> Cut:
    if not isinstance(cut, Cut):
        refuse("a flattened image has no rows and columns any more")
    return cut


def _place(layout: Layout, dim: int) -> int:
    cut = layout.cuts[dim]
    return 0 if cut is None else layout.place(_images(cut).axis)


def plans_for_windows(layout: Layout, windows: Sequence[Window], padding_mode: str = "zeros") -> list[DimPlan]:
    """A plan for each of the last dims, with the outputs in balanced parts."""
    behind = len(layout.shape) - len(windows)
    plans = []
    for number, window in enumerate(windows):
        extent, parts = layout.shape[behind + number], _parts(layout, behind + number)
        try:
            plans.append(DimPlan.of_window(extent, parts, window, padding_mode))
        except Exception as error:
            raise type(error)(f"{where()}: {error}") from None
    return plans


def plans_for_needs(
    layout: Layout, extents: Sequence[int], needed: Callable[[int, Interval], Interval], padding_mode: str = "zeros"
) -> list[DimPlan]:
    """A plan for each of the last dims, whose outputs of `extents` need, in dim `number`, `needed(number, outputs)`."""
    behind = len(layout.shape) - len(extents)
    plans = []
    for number, extent in enumerate(extents):
        parts = _parts(layout, behind + number)
        needs = tuple(needed(number, mine) if mine else Interval(0, 0) for mine in all_owned(extent, parts))
        whole = layout.shape[behind + number]
        plans.append(DimPlan(whole, all_owned(whole, parts), needs, padding_mode))
    return plans


def output_layout(layout: Layout, extents: Sequence[int], channels: int | None = None) -> Layout:
    """The layout of outputs whose last dims have `extents`: balanced, along the axes of the input."""
    behind = len(layout.shape) - len(extents)
    shape, cuts = list(layout.shape), list(layout.cuts)
    if channels is not None:
        shape[1], cuts[1] = channels, None
    for number, extent in enumerate(extents):
        shape[behind + number] = extent
        cuts[behind + number] = _balanced(layout.cuts[behind + number], extent)
    return layout.with_dims(tuple(shape), tuple(cuts))


def _balanced(cut: AnyCut, extent: int) -> AnyCut:
    if cut is None:
        return None
    return Cut.balanced(_images(cut).axis, extent, len(_images(cut).intervals))


def _parts(layout: Layout, dim: int) -> int:
    cut = layout.cuts[dim]
    return 1 if cut is None else len(_images(cut).intervals)


def nothing(shape: Sequence[int], *sources: Tensor | None) -> Tensor:
    """An empty tensor of `shape` that still hangs on its sources in the graph.

    A rank without outputs must take part in the backward exchange of the others.
    """
    first, *rest = (x for x in sources if x is not None)
    # A product, so that second derivatives hang on every source, too.
    zero = first.sum() * 0
    for x in rest:
        zero = zero * x.sum() + x.sum() * 0
    return zero.expand(tuple(shape)).clone()  # memory of its own: ReLU(inplace=True) may follow


def in_memory_as(result: Tensor, x: Tensor) -> Tensor:
    """`result`, channels_last if `x` is: so torch's own layers leave it, and dropout draws in the order of memory."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(x.dim(), torch.contiguous_format)
    if x.is_contiguous() or not x.is_contiguous(memory_format=wanted):
        wanted = torch.contiguous_format
    return result.contiguous(memory_format=wanted)


class Rebuilt:
    """What backward needs to make a buffer again from the tile that the graph holds anyway, and its borders."""

    def __init__(self, tile: Tensor, buffer: Tensor, box: tuple[Interval, ...]):
        self.tile, self.version = tile.detach(), tile._version
        self.shape, self.box = buffer.shape, box
        self.inner = (..., *(interval.as_slice() for interval in box))
        around = [(..., *(i.as_slice() for i in rest)) for rest in outside(buffer.shape[-len(box) :], box)]
        self.borders = [(where_, buffer.detach()[where_].clone()) for where_ in around]

    def value(self) -> Tensor:
        _check_version(self.tile, self.version)
        buffer = self.tile.new_empty(self.shape)
        buffer[self.inner] = self.tile
        for where_, border in self.borders:
            buffer[where_] = border
        return buffer


class Kept:
    """A tensor that backward needs as it is: torch checks no version of what goes through a hook."""

    def __init__(self, x: Tensor):
        self.x, self.version = x, x._version

    def value(self) -> Tensor:
        _check_version(self.x, self.version)
        return self.x


def _check_version(x: Tensor, version: int) -> None:
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(x.shape)} is at version {x._version}; expected version {version}. Run forward again "
            "after parameters or activations were changed (an optimizer's step changes parameters)"
        )


def outside(shape: Sequence[int], box: Sequence[Interval]) -> list[tuple[Interval, ...]]:
    """What lies around a box of a tensor whose last dims are `shape`: boxes that do not overlap."""
    whole = [Interval(0, extent) for extent in shape]
    found = []
    for at, (full, inner) in enumerate(zip(whole, box, strict=True)):
        for side in (Interval(0, inner.start), Interval(inner.stop, full.stop)):
            if side:
                found.append((*box[:at], side, *whole[at + 1 :]))
    return found


def remembered_as_tile(x: Part, buffer: Tensor, dims: Sequence[DimPlan]) -> AbstractContextManager[Any]:
    """While this context lasts, autograd remembers `buffer` as the tile, which lives anyway, and its borders.

    Without it every convolution would keep a second copy of its input.
    """
    tile, layout = local(x), x.layout_
    box = []
    for number, plan in enumerate(dims):
        place = _place(layout, len(layout.shape) - len(dims) + number)
        needed, own = plan.needed[place], plan.owned[place]
        if not own or own.start < needed.start or own.stop > needed.stop:
            return torch.autograd.graph.saved_tensors_hooks(Kept, _unpack)  # the tile is not wholly in the buffer
        box.append(own.shift(-needed.start))
    address, shape = buffer.data_ptr(), buffer.shape

    def pack(saved: Tensor) -> Kept | Rebuilt:
        if saved.data_ptr() != address or saved.shape != shape or tile.data_ptr() == address:
            return Kept(saved)
        return Rebuilt(tile, buffer, tuple(box))

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(packed: Kept | Rebuilt) -> Tensor:
    return packed.value()
