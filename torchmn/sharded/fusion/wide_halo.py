"""WideTile: a tile with a halo that several consecutive convolutions share, fetched by one exchange.

A halo that is wide enough for several convolutions is fetched once, before the first. Each of them convolves the tile
and its halo with torch's zero padding. That is right at the ends of the image and wrong in the outermost rows towards
neighbours, so the margin of rows with right values shrinks by the reach of each kernel. As long as it covers the next
kernel, no exchange is needed. Backward needs only the one exchange too: a rank differentiates its outputs through the
neighbours' rows, which it computed itself, and sends back the gradient of the rows that it fetched.

A ShardedTensor remains this rank's tile; its `extra` is the WideTile, for the wrappers around rules in
wide_convolution.py and wide_pointwise.py. Rules themselves see the tile only, and their results have no `extra`.

The width is found in the dry run before the first forward, which fetches the widest halo and records in
`ConvolutionRun` how many rows were used. It is stored under the weight of the first convolution, in
`Sharding.learned`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import ge, le, sub
from typing import NamedTuple

import torch
from torch import Tensor

from torchmn._torch_compat import version_of
from torchmn.context import here
from torchmn.geometry import DimPlan, Interval
from torchmn.sharded.exchange import FetchPlan, fetch
from torchmn.sharded.sharding import Cut, Sharding
from torchmn.sharded.tensor import ShardedTensor, wrap

# A wide halo saves exchanges, but every convolution of its run computes its rows too. Measured limits:
MOST_ROWS = 4
LARGEST_SHARE = 1 / 8  # of the smallest tile

Rows = tuple[int, ...]  # a number of rows per image dim, the same on all ranks; 0 where the dim is not cut


@dataclass
class ConvolutionRun:
    """Convolutions that share one exchange, as recorded in a dry run.

    Attributes:
        weight: name of the weight of the first one.
        image: extents of the image dims.
        used: how many rows of the halo were needed.
        convolutions: how many there are.
    """

    weight: str
    image: tuple[int, ...]
    used: Rows
    convolutions: int = 0

    def note(self, used: Rows) -> None:
        """Records one more convolution, for which that many rows are needed."""
        self.convolutions += 1
        self.used = tuple(map(max, self.used, used))


class WideTile(NamedTuple):
    """A tile with its halo.

    Attributes:
        tensor: tile and halo.
        width: rows of halo towards each neighbour; fewer at the ends of the image.
        margin: how many of these rows, counted from the tile, hold right values.
        version: of the tile's memory. An in-place change of the tile invalidates the halo.
        run: the run that is recorded in a dry run.
    """

    tensor: Tensor
    width: Rows
    margin: Rows
    version: int
    run: ConvolutionRun | None = None

    def covers(self, reach: Rows) -> bool:
        """Whether the margin is wide enough for a kernel with this reach."""
        return all(map(ge, self.margin, reach))

    def after(self, reach: Rows) -> Rows:
        """Returns the margin after a kernel with this reach; in a dry run, records the rows as used."""
        left = tuple(map(sub, self.margin, reach))
        if self.run is not None and any(reach):
            self.run.note(tuple(map(sub, self.width, left)))
        return left


def wide_tile_of(x: Tensor) -> WideTile | None:
    """Returns the tile `x` with its halo, if it has one that is still valid."""
    wide = getattr(x, "extra", None)
    if wide is None or wide.version != version_of(x):
        return None
    if x.requires_grad and not wide.tensor.requires_grad and torch.is_grad_enabled():
        return None  # requires_grad_() was called on the tile: its graph leads through the tile only
    return wide


def wide_tiles_of(tensors: Sequence[Tensor]) -> list[WideTile] | None:
    """Returns these tensors with their halos; None unless all are cut the same way, with halos of the same width."""
    wides: list[WideTile] = []
    layout: Sharding | None = getattr(tensors[0], "spec", None)
    for x in tensors:
        wide = wide_tile_of(x)
        if wide is None or layout is None or not isinstance(x, ShardedTensor):
            return None
        wides.append(wide)
        if (wide.width, wide.run) != (wides[0].width, wides[0].run):
            return None
        if x.spec.cuts != layout.cuts or x.spec.shape[2:] != layout.shape[2:]:
            return None
    return wides


def smallest_margin(wides: Sequence[WideTile]) -> Rows:
    """Returns the margin in which the values of all of them are right."""
    return tuple(map(min, zip(*[wide.margin for wide in wides], strict=True)))


def wrap_wide(
    tensor: Tensor, layout: Sharding, width: Rows, margin: Rows, run: ConvolutionRun | None = None
) -> ShardedTensor:
    """Returns the tile inside `tensor`, tile and halo, as a ShardedTensor with the WideTile as its `extra`."""
    tile = wrap(tile_of(tensor, layout, width), layout)
    tile.extra = WideTile(tensor, width, margin, version_of(tensor), run)
    return tile


def tile_of(tensor: Tensor, layout: Sharding, width: Rows) -> Tensor:
    """Returns a view of this rank's tile inside `tensor`, tile and halo."""
    key = (tile_of, width)
    box = layout.cache.get(key)
    if box is None:
        box = layout.cache[key] = _box(layout, width)
    for dim, start, length in box:
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _box(layout: Sharding, width: Rows) -> list[tuple[int, int, int]]:
    first = len(layout.shape) - len(width)
    owned = [(dim, layout.interval(dim)) for dim in layout.cut_dims]
    return [(dim, min(width[dim - first], interval.start), len(interval)) for dim, interval in owned]


def fetch_wide(x: ShardedTensor, weight: Tensor, reach: Rows) -> WideTile | None:
    """Returns `x` with a halo for the run of convolutions that begins with `weight`; None if no run begins there.

    Communicates, on all ranks or on none.

    Args:
        reach: rows that the first convolution needs.
    """
    image = x.spec.shape[-len(reach) :]
    width, run = _width(x, weight, image)
    if width is None or not all(map(ge, width, reach)):
        return None
    key = (fetch_wide, width)
    how = x.spec.cache.get(key)
    if how is None:
        how = x.spec.cache[key] = FetchPlan.of(x.spec, _plans(x.spec, width))
    return WideTile(fetch(x, how), width, width, 0, run)


def _width(x: ShardedTensor, weight: Tensor, image: tuple[int, ...]) -> tuple[Rows | None, ConvolutionRun | None]:
    if not x.spec.shape[0] or x.is_inference() or torch.is_inference_mode_enabled():
        return None, None  # in inference mode tensors have no versions, so a change of the tile could not be detected
    recorder = here.recorder
    if recorder is None:
        return _learned_width(x.spec.learned.get(id(weight), {}), image), None
    name = recorder.name_of(weight)
    if name is None:
        return None, None
    run = ConvolutionRun(name, image, (0,) * len(image))
    recorder.notes.append(run)
    return _widest(x.spec, len(image)), run


def _learned_width(widths: Widths, image: tuple[int, ...]) -> Rows | None:
    """Returns the width found for an image; if there was no dry run with it, that of the largest one that fits in."""
    found = widths.get(image)
    if found is None and widths:
        smaller = [known for known in widths if all(map(le, known, image))]
        found = widths[max(smaller, key=prod)] if smaller else None
    return found


def _widest(layout: Sharding, dims: int) -> Rows:
    """Returns the largest number of rows that may be fetched in each of the last `dims` dims."""
    widths = []
    for cut in layout.cuts[-dims:]:
        smallest = min(len(tile) for tile in cut.intervals) if isinstance(cut, Cut) else 0
        widths.append(min(MOST_ROWS, int(smallest * LARGEST_SHARE)))
    return tuple(widths)


def _plans(layout: Sharding, width: Rows) -> list[DimPlan]:
    plans = []
    for cut, extent, rows in zip(layout.cuts[-len(width) :], layout.shape[-len(width) :], width, strict=True):
        owned = cut.intervals if isinstance(cut, Cut) else (Interval(0, extent),)
        needed = tuple(Interval(max(0, tile.start - rows), min(extent, tile.stop + rows)) for tile in owned)
        plans.append(DimPlan(extent, owned, needed))
    return plans


Widths = dict[tuple[int, ...], Rows]  # image shape -> width of the halo


def found_widths(runs: Sequence[ConvolutionRun]) -> dict[str, Widths]:
    """Returns by the name of the first weight how wide a halo to fetch, for runs of at least two convolutions."""
    found: dict[str, Widths] = {}
    for run in runs:
        if run.convolutions > 1:
            widths = found.setdefault(run.weight, {})
            # If a weight begins several runs, as in a loop, all have the same width.
            widths[run.image] = tuple(map(max, run.used, widths.get(run.image, run.used)))
    return found
