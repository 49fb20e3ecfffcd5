"""Rules for pad, roll, flip and pixel shuffles, which move elements between tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.geometry import Interval
from torchmn.sharded.redistribute import whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import rule
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.sharded.windows import WindowPlan, plan_needs, windowed

_MODES = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


@rule(F.pad)
def pad(x: ShardedTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    layout = x.spec
    if not layout.is_tile:
        return F.pad(whole(x), pad, mode, value)
    amounts = [(low, high) for low, high in zip(pad[::2], pad[1::2], strict=True)][::-1]  # of the last dims, in order
    first = len(layout.shape) - len(amounts)
    if all(layout.cuts[first + number] is None for number in range(len(amounts))):
        shape = list(layout.shape)
        for number, (low, high) in enumerate(amounts):
            shape[first + number] += low + high
        return wrap(F.pad(local(x), pad, mode, value), layout.with_dims(tuple(shape), layout.cuts))
    if mode not in _MODES:
        refuse(f"expected a padding mode of {', '.join(_MODES)}, got {mode!r}")
    if mode != "constant" and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x = _cast_as_torch_does(x, len(amounts), mode)
    ranges = [range(-low, layout.shape[first + number] + high) for number, (low, high) in enumerate(amounts)]
    padded = at_indices(x, ranges, mode, value or 0.0)
    if mode == "circular":  # contiguous as torch's result: a later dropout draws in the order of memory
        return wrap(local(padded).contiguous(), padded.spec)
    return padded


def _cast_as_torch_does(x: ShardedTensor, dims: int, mode: str) -> ShardedTensor:
    """Returns `x` in the dtype in which torch pads it under autocast: some modes in float32."""
    tile = local(x)
    padded = F.pad(tile.new_zeros((1, 1, *[2] * dims)), (1, 1) * dims, mode)
    return x if padded.dtype == tile.dtype else wrap(tile.to(padded.dtype), x.spec)


def at_indices(x: ShardedTensor, ranges: Sequence[range], mode: str = "constant", fill: float = 0.0) -> ShardedTensor:
    """Returns the elements at these indices of the last dims, cut evenly again.

    Args:
        ranges: one per dim. Indices beyond the image are padding.
        mode: of padding, as of `F.pad`.
        fill: the value of constant padding.
    """
    layout = x.spec
    extents = [len(indices) for indices in ranges]
    if not all(extents):
        refuse(f"no elements would be left of {layout} at {list(ranges)}")

    def needed(number: int, outputs: Interval) -> Interval:
        indices = ranges[number][outputs.as_slice()]
        return Interval(indices[0], indices[-1] + 1)

    plan = plan_needs(layout, extents, needed, padding_mode=_MODES[mode])
    for dim in plan.dims:
        dim.check()
    steps = (..., *(slice(None, None, indices.step) for indices in ranges))

    def compute(tile: Tensor) -> Tensor:
        if any(indices.step > 1 for indices in ranges):
            tile = tile[steps]
        # Where a rank needs exactly its tile, a later in-place change of the result must not change x.
        shares_memory = tile.untyped_storage().data_ptr() == local(x).untyped_storage().data_ptr()
        return tile.clone() if shares_memory else tile

    return windowed(x, plan, compute, fill=fill)


@rule("roll")
def roll(x: ShardedTensor, shifts: Any, dims: Any = None) -> Tensor:
    layout = x.spec
    if dims is None or dims == ():
        refuse(f"roll of all elements of {layout} is not supported: name the dims")
    if not layout.is_tile:
        return whole(x).roll(shifts, dims)
    shifts, dims = [shifts] if isinstance(shifts, int) else shifts, [dims] if isinstance(dims, int) else dims
    dims = [layout.dim(dim) for dim in dims]
    ranges = [range(extent) for extent in layout.shape]
    for shift, dim in zip(shifts, dims, strict=True):
        extent, before = layout.shape[dim], ranges[dim]
        shift = (shift - before.start) % extent if extent else 0
        ranges[dim] = range(-shift, extent - shift)
    first = min(dims)
    return at_indices(x, ranges[first:], "circular")


@rule("flip")
def flip(x: ShardedTensor, *dims: Any) -> Tensor:
    layout = x.spec
    which = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    if not layout.is_tile:
        return torch.flip(whole(x), which)
    if any(layout.cuts[dim] is not None for dim in which):
        refuse(f"flip along a cut dim of {layout} is not supported")
    return wrap(torch.flip(local(x), which), layout)


@rule("pixel_shuffle")
def pixel_shuffle(x: ShardedTensor, upscale_factor: int) -> Tensor:
    layout, factor = x.spec, upscale_factor
    if not layout.is_tile:
        return F.pixel_shuffle(whole(x), factor)
    channels = layout.shape[-3]
    if layout.cuts[-3] is not None or channels % factor**2:
        refuse(f"pixel_shuffle expects channels that are whole and divisible by {factor**2}, got {layout}")
    extents = [extent * factor for extent in layout.shape[-2:]]

    def needed(_: int, outputs: Interval) -> Interval:
        return Interval(outputs.start // factor, -(-outputs.stop // factor))

    plan = _with_channels(plan_needs(layout, extents, needed), channels // factor**2)

    def compute(tile: Tensor) -> Tensor:
        tile = F.pixel_shuffle(tile, factor)
        for dim in (len(layout.shape) - 2, len(layout.shape) - 1):
            outputs = plan.result.interval(dim)
            tile = tile.narrow(dim, outputs.start % factor, len(outputs))
        return tile

    return windowed(x, plan, compute)


@rule("pixel_unshuffle")
def pixel_unshuffle(x: ShardedTensor, downscale_factor: int) -> Tensor:
    layout, factor = x.spec, downscale_factor
    if not layout.is_tile:
        return F.pixel_unshuffle(whole(x), factor)
    if layout.cuts[-3] is not None or any(extent % factor for extent in layout.shape[-2:]):
        refuse(f"pixel_unshuffle expects whole channels and an image divisible by {factor}, got {layout}")
    extents = [extent // factor for extent in layout.shape[-2:]]

    def needed(_: int, outputs: Interval) -> Interval:
        return Interval(outputs.start * factor, outputs.stop * factor)

    plan = _with_channels(plan_needs(layout, extents, needed), layout.shape[-3] * factor**2)
    return windowed(x, plan, lambda tile: F.pixel_unshuffle(tile, factor))


def _with_channels(plan: WindowPlan, channels: int) -> WindowPlan:
    """Returns the plan for outputs with this number of channels, in dim -3: there may be no batch dim."""
    shape = list(plan.result.shape)
    shape[-3] = channels
    return plan._replace(result=plan.result.with_dims(tuple(shape), plan.result.cuts))
