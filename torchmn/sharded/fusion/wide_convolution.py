"""A wrapper around the rule of convolutions: on tiles with a wide halo, or overlapped with the halo exchange."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from torchmn.geometry import HaloPlan, Window
from torchmn.sharded.exchange import plan_of_tile
from torchmn.sharded.fusion.halo_convolution import halo_convolution
from torchmn.sharded.fusion.wide_halo import Rows, WideTile, fetch_wide, wide_tile_of, wrap_wide
from torchmn.sharded.registry import Rule, wrap_rule
from torchmn.sharded.rules.convolution import parameters_of, windows_of
from torchmn.sharded.sharding import Sharding
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.sharded.windows import plan_windows


class PreparedConvolution(NamedTuple):
    """The integers of a convolution of one sharding, computed once for all steps.

    Attributes:
        stride, padding, dilation: one number per image dim; the padding at the low end.
        plan: the halo exchange of this rank's tile; None if the image was transposed.
        result: the sharding of the outputs.
        reach: rows that the kernel needs in each cut dim, if the convolution can run on wide tiles: it keeps the size
            of the image with torch's padding. None otherwise.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    plan: HaloPlan | None
    result: Sharding
    reach: Rows | None


def prepare(spec: Sharding, weight: tuple[int, ...], stride: Any, padding: Any, dilation: Any) -> PreparedConvolution:
    """Returns the integers of a convolution.

    Args:
        spec: the sharding of its input.
        weight: the shape of its weight.
    """
    windows = windows_of(weight, stride, padding, dilation)
    key = (prepare, windows, weight[0])
    known = spec.cache.get(key)
    if known is None:
        dims, result = plan_windows(spec, windows, weight[0])
        plan = plan_of_tile(spec, dims)
        reach = None if plan is None else _reach(spec, result, windows)
        settings = [(window.stride, window.padding[0], window.dilation) for window in windows]
        strides, paddings, dilations = zip(*settings, strict=True)
        known = spec.cache[key] = PreparedConvolution(strides, paddings, dilations, plan, result, reach)
    return known


def _reach(spec: Sharding, result: Sharding, windows: tuple[Window, ...]) -> Rows | None:
    reach = []
    for dim, window in enumerate(windows, start=2):
        low, high = window.padding
        is_cut = spec.cuts[dim] is not None
        keeps_tiles = window.stride == 1 and low + high == window.span - 1 and spec.cuts[dim] == result.cuts[dim]
        if low != high or (is_cut and not keeps_tiles):
            return None
        reach.append(low if is_cut else 0)
    return tuple(reach)


@wrap_rule("conv1d", "conv2d", "conv3d")
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
    prepared = prepare(x.spec, weight.shape, stride, padding, dilation)
    wide = wide_tile_for(x, weight, prepared.reach)
    if wide is not None and prepared.reach is not None:
        weight, bias = parameters_of(x, weight, bias)
        convolved = function(wide.tensor, weight, bias, stride, prepared.padding, dilation, groups)
        return wrap_wide(convolved, prepared.result, wide.width, wide.after(prepared.reach), wide.run)
    if prepared.plan is None or x.is_meta:
        return rule(x, weight, bias, stride, padding, dilation, groups)
    weight, bias = parameters_of(x, weight, bias)
    tiles = x.spec.grid.tiles
    convolved = halo_convolution(
        local(x), weight, bias, prepared.plan, tiles, prepared.stride, prepared.dilation, groups
    )
    return wrap(convolved, prepared.result)


def wide_tile_for(x: ShardedTensor, weight: Tensor, reach: Rows | None) -> WideTile | None:
    """Returns the tile with a halo for a kernel's reach: the one it has, or one fetched for a run that begins here."""
    if reach is None:
        return None
    wide = wide_tile_of(x)
    if wide is not None and wide.covers(reach) and any(wide.margin):
        return wide
    return fetch_wide(x, weight, reach) if any(reach) else None
