"""Rules for interpolate and upsample: the weights of the inputs depend on the global position of each output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.geometry import Interval
from torchmn.sharded.memory_format import with_memory_format_of
from torchmn.sharded.redistribute import whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import rule
from torchmn.sharded.tensor import ShardedTensor, local
from torchmn.sharded.windows import plan_needs, windowed

_LINEAR = {"linear": 1, "bilinear": 2, "trilinear": 3}


@rule(F.interpolate)
def interpolate(
    x: ShardedTensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    layout = x.spec
    if not layout.is_tile:
        return F.interpolate(whole(x), size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    dims = len(layout.shape) - 2
    if antialias or not (mode in ("nearest", "nearest-exact") or _LINEAR.get(mode) == dims):
        refuse(
            f"interpolate with mode {mode!r}, antialias={antialias} is not supported on {layout}. Use nearest or linear"
        )
    extents, scales = _extents_and_scales(layout.shape[2:], size, scale_factor, recompute_scale_factor)
    if min(extents) < 1:
        refuse(f"interpolate of {layout} to {extents}: expected output sizes of at least 1")
    taps = [_Taps(layout.shape[2 + i], extents[i], scales[i], mode, bool(align_corners), dims) for i in range(dims)]
    plan = plan_needs(layout, extents, lambda number, outputs: taps[number].needed(outputs))

    def compute(tile: Tensor) -> Tensor:
        for number, tap in enumerate(taps):
            tile = tap.apply(tile, 2 + number, plan.result.interval(2 + number))
        return with_memory_format_of(tile, local(x))

    return windowed(x, plan, compute)


@rule(F.upsample)
def upsample(x: ShardedTensor, *args: Any, **kwargs: Any) -> Tensor:
    return interpolate(x, *args, **kwargs)


class _Taps:
    """The inputs of each output along one dim and their weights, by torch's formulas."""

    def __init__(self, extent: int, outputs: int, scale: float | None, mode: str, align_corners: bool, dims: int):
        self.nearest = mode.startswith("nearest")
        if self.nearest:
            self.first = _nearest(extent, outputs, scale, mode, dims)
        else:
            places, step = torch.arange(outputs, dtype=torch.float64), extent / outputs if scale is None else 1 / scale
            if outputs == extent:  # torch copies in this case, for any scale
                source = places
            elif align_corners:
                source = places * ((extent - 1) / (outputs - 1) if outputs > 1 else 0.0)
            else:
                source = ((places + 0.5) * step - 0.5).clamp_(min=0)
            self.first = source.floor().long().clamp_(max=extent - 1)
            self.second = (self.first + 1).clamp_(max=extent - 1)
            self.weight = (source - self.first).clamp_(0, 1)

    def needed(self, outputs: Interval) -> Interval:
        """Returns the inputs of these outputs."""
        last = self.first if self.nearest else self.second
        return Interval(int(self.first[outputs.start]), int(last[outputs.stop - 1]) + 1)

    def apply(self, buffer: Tensor, dim: int, outputs: Interval) -> Tensor:
        """Returns these outputs along `dim` from a buffer with `needed(outputs)`."""
        start, chosen = self.needed(outputs).start, outputs.as_slice()
        low = buffer.index_select(dim, (self.first[chosen] - start).to(buffer.device))
        if self.nearest:
            return low
        high = buffer.index_select(dim, (self.second[chosen] - start).to(buffer.device))
        weight = self.weight[chosen].to(buffer).view(-1, *[1] * (buffer.dim() - 1 - dim))
        return low * (1 - weight) + high * weight


@lru_cache(maxsize=1024)
def _nearest(extent: int, outputs: int, scale: float | None, mode: str, dims: int) -> Tensor:
    """Returns the input that each output copies, computed by torch itself: its rounding differs between 1D and 2D."""
    rest = [1] * (dims - 1)
    places = torch.arange(extent, dtype=torch.float64).view(1, 1, extent, *rest)
    if scale is None:
        return F.interpolate(places, (outputs, *rest), mode=mode).view(-1).long()
    return F.interpolate(places, scale_factor=(scale, *[1.0] * len(rest)), mode=mode).view(-1).long()


def _extents_and_scales(
    extents: Sequence[int], size: Any, scale_factor: Any, recompute: bool | None
) -> tuple[list[int], list[float | None]]:
    """Returns the output extents, and per dim the scale that the formulas use; None where the extents determine it."""
    dims = len(extents)
    if size is not None:
        sizes = [size] * dims if isinstance(size, int) else [int(s) for s in size]
        return (sizes * dims if len(sizes) == 1 else sizes), [None] * dims
    if scale_factor is None:
        refuse("interpolate expects size or scale_factor")
    scales = [float(scale_factor)] * dims if isinstance(scale_factor, int | float) else [float(s) for s in scale_factor]
    sizes = [math.floor(extent * scale) for extent, scale in zip(extents, scales, strict=True)]
    return sizes, [None] * dims if recompute else list(scales)
