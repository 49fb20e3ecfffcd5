"""Padding, rolling and pixel shuffles: an image that is moved over the borders of the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.geometry import Interval
from torchmn.nn.parts.exchange import fetch, nothing, output_layout, plans_for_needs
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
    if mode != "constant" and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x = _cast_as_torch_does(x, len(around), mode)
    ranges = [range(-low, layout.shape[behind + number] + high) for number, (low, high) in enumerate(around)]
    padded = moved(x, ranges, mode, value or 0.0)
    if mode == "circular":  # contiguous as torch's: dropout draws in the order of memory
        return wrap(local(padded).contiguous(), padded.layout_)
    return padded


def _cast_as_torch_does(x: Part, dims: int, mode: str) -> Part:
    """`x` as autocast lets torch pad it: some modes in float32."""
    mine = local(x)
    padded = F.pad(mine.new_zeros((1, 1, *[2] * dims)), (1, 1) * dims, mode)
    return x if padded.dtype == mine.dtype else wrap(mine.to(padded.dtype), x.layout_)


def moved(x: Part, ranges: Sequence[range], mode: str = "constant", fill: float = 0.0) -> Part:
    """The last dims at these indices (which may lie beyond the image), in balanced parts again."""
    layout = x.layout_
    extents = [len(indices) for indices in ranges]
    if not all(extents):
        refuse(f"nothing would be left of {layout} at {list(ranges)}")

    def needed(number: int, mine: Interval) -> Interval:
        indices = ranges[number][mine.as_slice()]
        return Interval(indices[0], indices[-1] + 1)

    plans = plans_for_needs(layout, extents, needed, _MODES[mode])
    for plan in plans:
        plan.check()
    buffer = fetch(x, plans, fill)
    if any(indices.step > 1 for indices in ranges):
        buffer = buffer[(..., *(slice(None, None, indices.step) for indices in ranges))]
    if buffer.untyped_storage().data_ptr() == local(x).untyped_storage().data_ptr():
        buffer = buffer.clone()  # some ranks need nothing but their own: who changes the result must not change x there
    return wrap(buffer, output_layout(layout, extents))


@rule("roll")
def roll(x: Part, shifts: Any, dims: Any = None) -> Tensor:
    layout = x.layout_
    if dims is None or dims == ():
        refuse(f"roll of all elements of {layout} is not supported: name the dims")
    if not layout.is_tile:
        return whole(x).roll(shifts, dims)
    shifts, dims = [shifts] if isinstance(shifts, int) else shifts, [dims] if isinstance(dims, int) else dims
    ranges = [range(extent) for extent in layout.shape]
    for shift, dim in zip(shifts, dims, strict=True):
        extent, before = layout.shape[dim], ranges[dim]
        shift = (shift - before.start) % extent if extent else 0
        ranges[dim] = range(-shift, extent - shift)
    first = min(d % len(layout.shape) for d in dims)
    return moved(x, ranges[first:], "circular")


@rule("flip")
def flip(x: Part, *dims: Any) -> Tensor:
    layout = x.layout_
    which = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    if not layout.is_tile:
        return torch.flip(whole(x), which)
    if any(layout.cuts[dim] is not None for dim in which):
        refuse(f"flip along a cut dim of {layout} is not supported")
    return wrap(torch.flip(local(x), which), layout)


@rule("pixel_shuffle")
def pixel_shuffle(x: Part, upscale_factor: int) -> Tensor:
    layout, factor = x.layout_, upscale_factor
    if not layout.is_tile:
        return F.pixel_shuffle(whole(x), factor)
    channels = layout.shape[-3]
    if layout.cuts[-3] is not None or channels % factor**2:
        refuse(f"pixel_shuffle expects channels that are whole and divisible by {factor**2}, got {layout}")
    extents = [extent * factor for extent in layout.shape[-2:]]
    result = _with_channels(output_layout(layout, extents), channels // factor**2)

    def needed(_: int, mine: Interval) -> Interval:
        return Interval(mine.start // factor, -(-mine.stop // factor))

    buffer = fetch(x, plans_for_needs(layout, extents, needed))
    if 0 in result.local_shape():
        return wrap(nothing(result.local_shape(), buffer), result)
    buffer = F.pixel_shuffle(buffer, factor)
    for dim in (len(layout.shape) - 2, len(layout.shape) - 1):
        mine = result.interval(dim)
        buffer = buffer.narrow(dim, mine.start % factor, len(mine))
    return wrap(buffer, result)


@rule("pixel_unshuffle")
def pixel_unshuffle(x: Part, downscale_factor: int) -> Tensor:
    layout, factor = x.layout_, downscale_factor
    if not layout.is_tile:
        return F.pixel_unshuffle(whole(x), factor)
    if layout.cuts[-3] is not None or any(extent % factor for extent in layout.shape[-2:]):
        refuse(f"pixel_unshuffle expects whole channels and an image divisible by {factor}, got {layout}")
    extents = [extent // factor for extent in layout.shape[-2:]]
    result = _with_channels(output_layout(layout, extents), layout.shape[-3] * factor**2)

    def needed(_: int, mine: Interval) -> Interval:
        return Interval(mine.start * factor, mine.stop * factor)

    buffer = fetch(x, plans_for_needs(layout, extents, needed))
    if 0 in result.local_shape():
        return wrap(nothing(result.local_shape(), buffer), result)
    return wrap(F.pixel_unshuffle(buffer, factor), result)


def _with_channels(layout: Any, channels: int) -> Any:
    shape = list(layout.shape)
    shape[-3] = channels
    return layout.with_dims(tuple(shape), layout.cuts)
