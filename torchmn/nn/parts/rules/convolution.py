"""Convolutions: fetch the halo, compute this rank's outputs with the whole filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from torchmn.functions.halo_convolution import halo_convolution
from torchmn.geometry import DimPlan, HaloPlan, Interval, Window
from torchmn.nn.parts.exchange import (
    fetch,
    nothing,
    output_layout,
    plan_of_tile,
    plans_for_needs,
    plans_for_windows,
    remembered_as_tile,
)
from torchmn.nn.parts.layout import Layout
from torchmn.nn.parts.moving import entering, gathered, whole
from torchmn.nn.parts.part import Part, local, wrap
from torchmn.nn.parts.refusals import refuse
from torchmn.nn.parts.rules.registry import rule
from torchmn.nn.parts.wide import Reach, Wide, fetch_wide, wide_of, wide_part


def per_dim(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """A setting of a layer, once per image dim."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def checked_image(x: Tensor, dims: int, function: str) -> Part | Tensor:
    """An image of `dims` dims with its channels whole, or a whole tensor if no image is cut."""
    if not isinstance(x, Part):
        return x
    layout = x.layout_
    if not layout.is_tile:
        return whole(x)
    if len(layout.shape) != dims + 2:
        refuse(f"{function} expects (batch, channel, {dims} image dims), got {layout}")
    if layout.cuts[1] is not None:
        refuse(f"{function} expects channels in dim 1, which is a cut image dim of {layout}")
    return x


class Prepared(NamedTuple):
    """What a convolution of one layout comes to, worked out from integers: once, for all steps."""

    windows: tuple[Window, ...]
    plans: list[DimPlan]
    plan: HaloPlan | None  # of this rank's tile
    result: Layout
    reach: Reach | None  # in cut dims, where it can run on wide tiles: it keeps the size, with torch's own padding


def prepared(
    layout: Layout,
    weight: Sequence[int],
    stride: Any,
    padding: Any,
    dilation: Any,
    extra: Any = 0,
    groups: int | None = None,
) -> Prepared:
    """The windows, plans and outputs of a convolution, transposed if it says how many `groups` its weight has.

    weight: its shape
    extra: what is added to the outputs of a transposed one
    """
    stride, padding, dilation, extra = (
        tuple(value) if isinstance(value, list) else value for value in (stride, padding, dilation, extra)
    )
    key = (prepared, weight, stride, padding, dilation, extra, groups)
    known = layout.worked_out.get(key)
    if known is None:
        known = layout.worked_out[key] = _prepare(layout, weight, stride, padding, dilation, extra, groups)
    return known


def _prepare(
    layout: Layout, weight: Sequence[int], stride: Any, padding: Any, dilation: Any, extra: Any, groups: int | None
) -> Prepared:
    dims = len(weight) - 2
    stride, dilation, extra = (per_dim(value, dims) for value in (stride, dilation, extra))
    windows = tuple(
        Window(
            weight[2 + i],
            stride[i],
            _padding(padding, i, dims, weight[2 + i], dilation[i]),
            dilation[i],
            transposed=groups is not None,
            output_padding=extra[i],
        )
        for i in range(dims)
    )
    extents = [window.output_extent(extent) for window, extent in zip(windows, layout.shape[2:], strict=True)]
    if groups is None:
        plans = plans_for_windows(layout, windows)
        result = output_layout(layout, extents, weight[0])
    else:
        plans = plans_for_needs(layout, extents, lambda number, outputs: _covering(windows[number], outputs))
        result = output_layout(layout, extents, weight[1] * groups)
    plan = plan_of_tile(layout, plans)
    reach = _reach(layout, result, windows) if groups is None and plan is not None else None
    return Prepared(windows, plans, plan, result, reach)


def _reach(layout: Layout, result: Layout, windows: Sequence[Window]) -> Reach | None:
    reach = []
    for dim, window in enumerate(windows, start=2):
        low, high = window.padding
        is_cut = layout.cuts[dim] is not None
        keeps_tiles = window.stride == 1 and low + high == window.span - 1 and layout.cuts[dim] == result.cuts[dim]
        if low != high or (is_cut and not keeps_tiles):
            return None
        reach.append(low if is_cut else 0)
    return tuple(reach)


def _padding(padding: Any, number: int, dims: int, kernel: int, dilation: int) -> tuple[int, int]:
    if padding == "valid":
        return (0, 0)
    if padding == "same":
        total = dilation * (kernel - 1)
        return (total // 2, total - total // 2)
    amount = per_dim(padding, dims)[number]
    return (amount, amount)


@rule("conv1d", "conv2d", "conv3d")
def convolution(
    x: Part,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    weight, bias = gathered(weight), gathered(bias)
    dims = weight.dim() - 2
    function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    image = checked_image(x, dims, f"conv{dims}d")
    if not isinstance(image, Part):
        return function(image, weight, bias, stride, padding, dilation, groups)
    work = prepared(x.layout_, weight.shape, stride, padding, dilation)
    stride, dilation = per_dim(stride, dims), per_dim(dilation, dims)
    wide = wide_enough(x, weight, work.reach)
    weight, bias = _entering(weight, bias, x)
    if wide is not None and work.reach is not None:
        around = tuple(window.padding[0] for window in work.windows)
        convolved = function(wide.tensor, weight, bias, stride, around, dilation, groups)
        return wide_part(convolved, work.result, wide.width, wide.after(work.reach), wide.run)
    mine = local(x)
    if work.plan is not None and not mine.is_meta:
        convolved = halo_convolution(mine, weight, bias, work.plan, x.layout_.grid.tiles, stride, dilation, groups)
        return wrap(convolved, work.result)
    return _of_buffer(x, weight, bias, work, lambda buffer: function(buffer, weight, bias, stride, 0, dilation, groups))


def wide_enough(x: Part, weight: Tensor, reach: Reach | None) -> Wide | None:
    """The tile with enough around it for a kernel's reach: remembered, or fetched for a run that begins here."""
    if reach is None:
        return None
    wide = wide_of(x)
    if wide is not None and wide.covers(reach) and any(wide.margin):
        return wide
    return fetch_wide(x, weight, reach) if any(reach) else None


def _entering(weight: Tensor, bias: Tensor | None, x: Part) -> tuple[Tensor, Tensor | None]:
    return entering(weight, x.layout_), None if bias is None else entering(bias, x.layout_)


def _of_buffer(
    x: Part, weight: Tensor, bias: Tensor | None, work: Prepared, compute: Callable[[Tensor], Tensor]
) -> Part:
    """What `compute` gives for the tile in its halos and padding; backward makes that buffer again."""
    buffer, shape = fetch(x, work.plans), work.result.local_shape()
    if 0 in shape:
        return wrap(nothing(shape, buffer, weight, bias), work.result)
    with remembered_as_tile(x, buffer, work.plans):
        return wrap(compute(buffer), work.result)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(
    x: Part,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    weight, bias = gathered(weight), gathered(bias)
    dims = weight.dim() - 2
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    image = checked_image(x, dims, f"conv_transpose{dims}d")
    if not isinstance(image, Part):
        return function(image, weight, bias, stride, padding, output_padding, groups, dilation)
    work = prepared(x.layout_, weight.shape, stride, padding, dilation, output_padding, groups)
    weight, bias = _entering(weight, bias, x)

    def compute(buffer: Tensor) -> Tensor:
        everything = function(buffer, weight, bias, stride, 0, 0, groups, dilation)
        # The buffer's first input reaches outputs from `first` on, which may lie before this rank's own.
        for number, window in enumerate(work.windows):
            mine = work.result.interval(2 + number)
            first = _covering(window, mine).start * window.stride - window.padding[0]
            everything = everything.narrow(2 + number, mine.start - first, len(mine))
        return everything

    return _of_buffer(x, weight, bias, work, compute)


def _covering(window: Window, outputs: Interval) -> Interval:
    """Inputs (zeros beyond the image) whose outputs reach over all of `outputs`, also where no tap falls."""
    low = window.padding[0]
    start = (outputs.start + low - window.span + 1) // window.stride
    stop = (outputs.stop - 1 + low) // window.stride + 1
    while (stop - 1) * window.stride - low + window.span < outputs.stop:
        stop += 1
    return Interval(start, stop)
