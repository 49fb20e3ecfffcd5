"""Tiles that remember what lies around them: one halo exchange for a run of convolutions.

A halo that is wide enough for several convolutions is fetched once, in front of the first. Each of them convolves all
of it with torch's own zero padding: right at the ends of the image, and wrong in the outermost rows towards neighbours,
so the margin in which values are right shrinks by as much as the kernel reaches. As long as it covers the next kernel,
nothing travels. Backward needs no messages either: a rank differentiates its own outputs through its neighbours' rows,
which it computed itself, and only what it fetched has a gradient to send back.

A ShardedTensor stays this rank's tile; what lies around it is its `extra`, for the functions of convolution.py and
pointwise.py around rules. Rules see the tile, and their results remember nothing.

How wide to fetch is found by the run without values that comes before the first forward: it fetches as much as may be
fetched at all, and `Run` notes how much of it was of use. The number belongs to the weight of the first convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import ge, sub
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn._torch_compat import version_of
from torchmn.context import here
from torchmn.geometry import DimPlan, Interval
from torchmn.sharded.exchange import Fetching, fetch
from torchmn.sharded.sharding import Cut, Sharding
from torchmn.sharded.tensor import ShardedTensor, wrap

# A wide halo saves exchanges, but every convolution of its run computes all of its rows: up to here that pays.
MOST_ROWS = 4
LARGEST_SHARE = 1 / 8  # of the smallest tile

Reach = tuple[int, ...]  # one number of rows per image dim, the same on all ranks; 0 where the dim is not cut


@dataclass
class Run:
    """The convolutions that share one exchange, as a run without values sees them."""

    weight: str  # the name of the first one's
    image: tuple[int, ...]
    used: Reach
    convolutions: int = 0

    def note(self, used: Reach) -> None:
        self.convolutions += 1
        self.used = tuple(map(max, self.used, used))


class Wide(NamedTuple):
    """A tile with what lies around it, up to `width` rows towards each neighbour, if the image has as many."""

    tensor: Tensor
    width: Reach
    margin: Reach  # how many of the rows around the tile hold right values
    version: int  # of the tile's memory: who writes to the tile alone makes the rest outdated
    run: Run | None = None

    def covers(self, reach: Reach) -> bool:
        """Whether a kernel that reaches so far finds right values for all of the tile's outputs."""
        return all(map(ge, self.margin, reach))

    def after(self, reach: Reach) -> Reach:
        """The margin that such a kernel leaves; in a run without values, noted as used."""
        left = tuple(map(sub, self.margin, reach))
        if self.run is not None and any(reach):
            self.run.note(tuple(map(sub, self.width, left)))
        return left


def wide_of(x: Tensor) -> Wide | None:
    """What `x` remembers of its surroundings, if that still holds."""
    wide = getattr(x, "extra", None)
    if wide is None or wide.version != version_of(x):
        return None
    if x.requires_grad and not wide.tensor.requires_grad and torch.is_grad_enabled():
        return None  # the tile was made without a graph and then given one: it leads through the tile only
    return wide


def wides_of(parts: Sequence[Tensor]) -> list[Wide] | None:
    """What these tensors remember, if all are parts of the same image that remember as much of it."""
    wides: list[Wide] = []
    layout: Any = getattr(parts[0], "spec", None)
    for x in parts:
        wide = wide_of(x)
        if wide is None or layout is None:
            return None
        wides.append(wide)
        if (wide.width, wide.run) != (wides[0].width, wides[0].run):
            return None
        if x.spec.cuts != layout.cuts or x.spec.shape[2:] != layout.shape[2:]:  # type: ignore[attr-defined]
            return None
    return wides


def smallest_margin(wides: Sequence[Wide]) -> Reach:
    """What is right in all of them."""
    return tuple(map(min, zip(*[wide.margin for wide in wides], strict=True)))


def wide_part(tensor: Tensor, layout: Sharding, width: Reach, margin: Reach, run: Run | None = None) -> ShardedTensor:
    """The tile inside of a wide tensor, as a ShardedTensor that remembers the rest."""
    part = wrap(tile_of(tensor, layout, width), layout)
    part.extra = Wide(tensor, width, margin, version_of(tensor), run)
    return part


def tile_of(tensor: Tensor, layout: Sharding, width: Reach) -> Tensor:
    """This rank's tile of a wide tensor, a view."""
    key = (tile_of, width)
    box = layout.worked_out.get(key)
    if box is None:
        box = layout.worked_out[key] = _box(layout, width)
    for dim, start, length in box:
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _box(layout: Sharding, width: Reach) -> list[tuple[int, int, int]]:
    behind = len(layout.shape) - len(width)
    own = [(dim, layout.interval(dim)) for dim in layout.cut_dims]
    return [(dim, min(width[dim - behind], mine.start), len(mine)) for dim, mine in own]


def fetch_wide(x: ShardedTensor, weight: Tensor, reach: Reach) -> Wide | None:
    """What lies around `x`, as far as a run of convolutions that begins with `weight` wants it; None for no run.

    Communicates, on all ranks or on none.
    """
    image = x.spec.shape[-len(reach) :]
    width, run = _width(x, weight, image)
    if width is None or not all(map(ge, width, reach)):
        return None
    key = (fetch_wide, width)
    how = x.spec.worked_out.get(key)
    if how is None:
        how = x.spec.worked_out[key] = Fetching.of(x.spec, _plans(x.spec, width))
    return Wide(fetch(x, how), width, width, 0, run)


def _width(x: ShardedTensor, weight: Tensor, image: tuple[int, ...]) -> tuple[Reach | None, Run | None]:
    if not x.spec.shape[0] or x.is_inference() or torch.is_inference_mode_enabled():
        return None, None  # in inference mode tensors have no versions: nobody could tell when a tile was changed
    recorder = here.recorder
    if recorder is None:
        return x.spec.learned.get(id(weight), {}).get(image), None
    name = recorder.name_of(weight)
    if name is None:
        return None, None
    run = Run(name, image, (0,) * len(image))
    recorder.notes.append(run)
    return _widest(x.spec, len(image)), run


def _widest(layout: Sharding, dims: int) -> Reach:
    """As many rows as may be fetched in each of the last `dims` dims."""
    widths = []
    for cut in layout.cuts[-dims:]:
        smallest = min(len(tile) for tile in cut.intervals) if isinstance(cut, Cut) else 0
        widths.append(min(MOST_ROWS, int(smallest * LARGEST_SHARE)))
    return tuple(widths)


def _plans(layout: Sharding, width: Reach) -> list[DimPlan]:
    plans = []
    for cut, extent, rows in zip(layout.cuts[-len(width) :], layout.shape[-len(width) :], width, strict=True):
        owned = cut.intervals if isinstance(cut, Cut) else (Interval(0, extent),)
        needed = tuple(Interval(max(0, mine.start - rows), min(extent, mine.stop + rows)) for mine in owned)
        plans.append(DimPlan(extent, owned, needed))
    return plans


Widths = dict[tuple[int, ...], Reach]  # image shape -> how wide to fetch


def found_widths(runs: Sequence[Run]) -> dict[str, Widths]:
    """By weight, how wide to fetch where at least two convolutions share an exchange."""
    found: dict[str, Widths] = {}
    for run in runs:
        if run.convolutions > 1:
            widths = found.setdefault(run.weight, {})
            # A weight that begins several runs, as in a loop, has one width for all.
            widths[run.image] = tuple(map(max, run.used, widths.get(run.image, run.used)))
    return found
