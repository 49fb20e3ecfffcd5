"""Padding and slicing: an image that is moved over the borders of the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from torchmn.nn.parts.exchange import fetch, output_layout, plans_for_needs
from torchmn.nn.parts.layout import Layout
from torchmn.nn.parts.moving import whole
from torchmn.nn.parts.part import Part, local, wrap
from torchmn.nn.parts.refusals import refuse
from torchmn.nn.parts.rules.registry import rule

_MODES = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


@rule(F.pad)
def pad(x: Part, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    layout = x.layout_
    if not layout.is_tile:
        return F.pad(whole(x), pad, mode, value)
    around = [(low, high) for low, high in zip(pad[::2], pad[1::2], strict=True)][::-1]  # of the last dims, in order
    behind = len(layout.shape) - len(around)
    if all(layout.cuts[behind + number] is None for number in range(len(around))):
        shape = list(layout.shape)
        for number, (low, high) in enumerate(around):
            shape[behind + number] += low + high
        return wrap(F.pad(local(x), pad, mode, value), layout.with_dims(tuple(shape), layout.cuts))
    if mode not in _MODES:
        refuse(f"padding mode {mode!r} is not known")
    return moved(
        x, [(-low, layout.shape[behind + i] + high) for i, (low, high) in enumerate(around)], mode, value or 0.0
    )


def moved(x: Part, ranges: Sequence[tuple[int, int]], mode: str = "constant", fill: float = 0.0) -> Part:
    """The last dims from a first to a last index (which may lie beyond the image), in balanced parts again."""
    layout = x.layout_
    extents = [stop - start for start, stop in ranges]
    if any(extent < 1 for extent in extents):
        refuse(f"nothing would be left of {layout} between {list(ranges)}")
    result = output_layout(layout, extents)
    plans = plans_for_needs(layout, extents, lambda number, mine: mine.shift(ranges[number][0]), _MODES[mode])
    for plan in plans:
        plan.check()
    return wrap(fetch(x, plans, fill), result)


@rule("__getitem__")
def getitem(x: Part, index: Any) -> Tensor:
    layout = x.layout_
    if not layout.is_tile:
        return whole(x)[index]
    index = _full_index(index, layout)
    for dim, at in enumerate(index):
        if isinstance(at, slice):
            step = at.indices(layout.shape[dim])[2]
            if step != 1 and layout.cuts[dim] is not None:
                refuse(f"a slice with step {step} along a cut dim of {layout} is not supported")
        elif not isinstance(at, int) or layout.cuts[dim] is not None:
            refuse(f"index {index} of {layout} is not supported: cut dims take slices, others slices and ints")
    ranges = [
        at.indices(layout.shape[dim])[:2] if isinstance(at, slice) and layout.cuts[dim] is not None else None
        for dim, at in enumerate(index)
    ]
    first = next((dim for dim, span in enumerate(ranges) if span not in (None, (0, layout.shape[dim]))), None)
    if first is not None:
        wanted = [ranges[dim] or (0, layout.shape[dim]) for dim in range(first, len(layout.shape))]
        x = moved(x, wanted)
        layout = x.layout_
    local_index = tuple(at if layout.cuts[dim] is None else slice(None) for dim, at in enumerate(index))
    result = local(x)[local_index]
    kept = [dim for dim, at in enumerate(index) if isinstance(at, slice)]
    extents = [layout.shape[dim] if layout.cuts[dim] is not None else result.shape[at] for at, dim in enumerate(kept)]
    return wrap(result, layout.with_dims(tuple(extents), tuple(layout.cuts[dim] for dim in kept)))


def _full_index(index: Any, layout: Layout) -> tuple:
    """One entry per dim."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (len(layout.shape) - len(index) + 1), *index[at + 1 :])
    return (*index, *[slice(None)] * (len(layout.shape) - len(index)))


@rule("narrow")
def narrow(x: Part, dim: int, start: int, length: int) -> Tensor:
    dim %= len(x.layout_.shape)
    return getitem(x, (*[slice(None)] * dim, slice(start, start + length)))


@rule("chunk")
def chunk(x: Part, chunks: int, dim: int = 0) -> tuple:
    size = -(-x.layout_.shape[dim] // chunks)
    return split(x, size, dim)


@rule("split")
def split(x: Part, split_size: int | Sequence[int], dim: int = 0) -> tuple:
    extent = x.layout_.shape[dim]
    sizes = split_size
    if isinstance(split_size, int):
        sizes = [min(split_size, extent - start) for start in range(0, extent, split_size)]
    starts = [0]
    for size in sizes:  # type: ignore[union-attr]
        starts.append(starts[-1] + size)
    return tuple(narrow(x, dim, start, size) for start, size in zip(starts, sizes, strict=False))  # type: ignore[arg-type]
