"""Convolutions that compute with what lies around the tile, or while its halo travels."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from torchmn.geometry import HaloPlan, Window
from torchmn.sharded.exchange import plan_of_tile
from torchmn.sharded.fusion.border_products import halo_convolution
from torchmn.sharded.fusion.wide import Reach, Wide, fetch_wide, wide_of, wide_part
from torchmn.sharded.registry import Rule, around
from torchmn.sharded.rules.convolution import parameters_of, windows_of
from torchmn.sharded.sharding import Sharding
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.sharded.windows import plan_windows


class Prepared(NamedTuple):
    """What a convolution of one sharding comes to, worked out from integers: once, for all steps."""

    stride: tuple[int, ...]  # of each dim, as the next ones
    padding: tuple[int, ...]  # at the low end
    dilation: tuple[int, ...]
    plan: HaloPlan | None  # of this rank's tile
    result: Sharding
    reach: Reach | None  # in cut dims, where it can run on wide tiles: it keeps the size, with torch's own padding


def prepared(spec: Sharding, weight: tuple[int, ...], stride: Any, padding: Any, dilation: Any) -> Prepared:
    """What a convolution comes to whose weight has that shape."""
    windows = windows_of(weight, stride, padding, dilation)
    key = (prepared, windows, weight[0])
    known = spec.worked_out.get(key)
    if known is None:
        dims, result = plan_windows(spec, windows, weight[0])
        plan = plan_of_tile(spec, dims)
        reach = None if plan is None else _reach(spec, result, windows)
        settings = [(window.stride, window.padding[0], window.dilation) for window in windows]
        strides, paddings, dilations = zip(*settings, strict=True)
        known = spec.worked_out[key] = Prepared(strides, paddings, dilations, plan, result, reach)
    return known


def _reach(spec: Sharding, result: Sharding, windows: tuple[Window, ...]) -> Reach | None:
    reach = []
    for dim, window in enumerate(windows, start=2):
        low, high = window.padding
        is_cut = spec.cuts[dim] is not None
        keeps_tiles = window.stride == 1 and low + high == window.span - 1 and spec.cuts[dim] == result.cuts[dim]
        if low != high or (is_cut and not keeps_tiles):
            return None
        reach.append(low if is_cut else 0)
    return tuple(reach)


@around("conv1d", "conv2d", "conv3d")
def convolution(
    function: Any,
    rule: Rule,
    x: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    is_image = isinstance(x, ShardedTensor) and x.spec.is_tile and len(x.spec.shape) == weight.dim()
    if (
        not is_image
        or x.spec.cuts[1] is not None
        or isinstance(weight, ShardedTensor)
        or isinstance(bias, ShardedTensor)
    ):
        return rule(x, weight, bias, stride, padding, dilation, groups)
    work = prepared(x.spec, weight.shape, stride, padding, dilation)
    wide = wide_enough(x, weight, work.reach)
    if wide is not None and work.reach is not None:
        weight, bias = parameters_of(x, weight, bias)
        convolved = function(wide.tensor, weight, bias, stride, work.padding, dilation, groups)
        return wide_part(convolved, work.result, wide.width, wide.after(work.reach), wide.run)
    if work.plan is None or x.is_meta:
        return rule(x, weight, bias, stride, padding, dilation, groups)
    weight, bias = parameters_of(x, weight, bias)
    tiles = x.spec.grid.tiles
    convolved = halo_convolution(local(x), weight, bias, work.plan, tiles, work.stride, work.dilation, groups)
    return wrap(convolved, work.result)


def wide_enough(x: ShardedTensor, weight: Tensor, reach: Reach | None) -> Wide | None:
    """The tile with enough around it for a kernel's reach: remembered, or fetched for a run that begins here."""
    if reach is None:
        return None
    wide = wide_of(x)
    if wide is not None and wide.covers(reach) and any(wide.margin):
        return wide
    return fetch_wide(x, weight, reach) if any(reach) else None
