"""Interpolation: each output takes a few inputs with weights that depend on its global place."""

from __future__ import annotations

import math
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

_LINEAR = {"linear": 1, "bilinear": 2, "trilinear": 3}


@rule(F.interpolate)
def interpolate(
    x: Part,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    layout = x.layout_
    if not layout.is_tile:
        return F.interpolate(whole(x), size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    dims = len(layout.shape) - 2
    if antialias or not (mode in ("nearest", "nearest-exact") or _LINEAR.get(mode) == dims):
        refuse(
            f"interpolate with mode {mode!r}, antialias={antialias} is not supported on {layout}. Use nearest or linear"
        )
    extents, steps = _extents_and_steps(layout.shape[2:], size, scale_factor, recompute_scale_factor)
    result = output_layout(layout, extents)
    taps = [_Taps(layout.shape[2 + i], extents[i], steps[i], mode, bool(align_corners)) for i in range(dims)]
    plans = plans_for_needs(layout, extents, lambda number, mine: taps[number].needed(mine))
    buffer = fetch(x, plans)
    shape = result.local_shape()
    if 0 in shape:
        return wrap(nothing(shape, buffer), result)
    for number, tap in enumerate(taps):
        buffer = tap.apply(buffer, 2 + number, result.interval(2 + number))
    return wrap(buffer, result)


@rule(F.upsample)
def upsample(x: Part, *args: Any, **kwargs: Any) -> Tensor:
    return interpolate(x, *args, **kwargs)


@rule("pixel_shuffle")
def pixel_shuffle(x: Part, upscale_factor: int) -> Tensor:
    layout = x.layout_
    mine = local(x)
    extents = [extent * upscale_factor for extent in layout.shape[-2:]]
    result = output_layout(layout, extents, layout.shape[1] // upscale_factor**2)
    for dim in (-2, -1):
        cut = layout.cuts[dim]
        balanced = result.cuts[dim]
        if cut is not None and any(
            a.start * upscale_factor != b.start
            for a, b in zip(cut.intervals, balanced.intervals, strict=True)  # type: ignore[union-attr]
        ):
            refuse(f"pixel_shuffle of {layout}, whose tiles are not equal, is not supported")
    return wrap(F.pixel_shuffle(mine, upscale_factor), result)


class _Taps:
    """Which inputs, with which weights, the outputs along one dim are made of: torch's formulas."""

    def __init__(self, extent: int, outputs: int, step: float, mode: str, align_corners: bool):
        self.extent, self.nearest = extent, mode.startswith("nearest")
        places = torch.arange(outputs, dtype=torch.float64)
        if mode == "nearest":
            self.first = _nearest(outputs, step).clamp_(max=extent - 1)
        elif mode == "nearest-exact":
            self.first = torch.floor((places + 0.5) * step).long().clamp_(max=extent - 1)
        else:
            if align_corners:
                source = places * ((extent - 1) / (outputs - 1) if outputs > 1 else 0.0)
            else:
                source = ((places + 0.5) * step - 0.5).clamp_(min=0)
            self.first = source.floor().long().clamp_(max=extent - 1)
            self.second = (self.first + 1).clamp_(max=extent - 1)
            self.weight = (source - self.first).clamp_(0, 1)

    def needed(self, outputs: Interval) -> Interval:
        last = self.first if self.nearest else self.second
        return Interval(int(self.first[outputs.start]), int(last[outputs.stop - 1]) + 1)

    def apply(self, buffer: Tensor, dim: int, outputs: Interval) -> Tensor:
        start, mine = self.needed(outputs).start, outputs.as_slice()
        low = buffer.index_select(dim, (self.first[mine] - start).to(buffer.device))
        if self.nearest:
            return low
        high = buffer.index_select(dim, (self.second[mine] - start).to(buffer.device))
        weight = self.weight[mine].to(buffer).view(-1, *[1] * (buffer.dim() - 1 - dim))
        return low * (1 - weight) + high * weight


def _nearest(outputs: int, step: float) -> Tensor:
    # torch computes this index in float32.
    return torch.floor(torch.arange(outputs, dtype=torch.float32) * torch.tensor(step, dtype=torch.float32)).long()


def _extents_and_steps(
    extents: Sequence[int], size: Any, scale_factor: Any, recompute: bool | None
) -> tuple[list[int], list[float]]:
    """Output extents, and how far apart in the input two neighbouring outputs are."""
    dims = len(extents)
    if size is not None:
        sizes = [size] * dims if isinstance(size, int) else [int(s) for s in size]
        return sizes, [extent / out for extent, out in zip(extents, sizes, strict=True)]
    if scale_factor is None:
        refuse("interpolate expects size or scale_factor")
    scales = [float(scale_factor)] * dims if isinstance(scale_factor, int | float) else [float(s) for s in scale_factor]
    sizes = [math.floor(extent * scale) for extent, scale in zip(extents, scales, strict=True)]
    if recompute:
        return sizes, [extent / out for extent, out in zip(extents, sizes, strict=True)]
    return sizes, [1.0 / scale for scale in scales]
