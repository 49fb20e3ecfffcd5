"""Pools over windows: fetch the halo, compute this rank's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.geometry import Window
from torchmn.nn.parts.exchange import fetch, nothing, output_layout, plans_for_windows, remembered_as_tile
from torchmn.nn.parts.layout import Layout
from torchmn.nn.parts.part import Part, wrap
from torchmn.nn.parts.refusals import refuse
from torchmn.nn.parts.rules.convolution import checked_image, per_dim
from torchmn.nn.parts.rules.registry import composed, rule

_MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


@rule("max_pool1d")
def max_pool1d(x: Part, *args: Any, **kwargs: Any) -> Tensor:
    return _max_pool(1, x, *args, **kwargs)


@rule("max_pool2d")
def max_pool2d(x: Part, *args: Any, **kwargs: Any) -> Tensor:
    return _max_pool(2, x, *args, **kwargs)


@rule("max_pool3d")
def max_pool3d(x: Part, *args: Any, **kwargs: Any) -> Tensor:
    return _max_pool(3, x, *args, **kwargs)


def _max_pool(
    dims: int,
    x: Part,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    image = checked_image(x, dims, f"max_pool{dims}d")
    if not isinstance(image, Part):
        return _MAX[dims - 1](image, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    if return_indices:
        refuse("max_pool with return_indices=True is not supported for cut images: indices count within one tile")
    kernel, dilation = per_dim(kernel_size, dims), per_dim(dilation, dims)
    strides, paddings = per_dim(stride or kernel, dims), per_dim(padding, dims)
    windows = [
        Window(kernel[i], strides[i], (paddings[i], paddings[i]), dilation[i], bool(ceil_mode)) for i in range(dims)
    ]
    layout = x.layout_
    plans = plans_for_windows(layout, windows)
    result = output_layout(layout, [w.output_extent(e) for w, e in zip(windows, layout.shape[2:], strict=True)])
    buffer = fetch(x, plans, fill=float("-inf"))
    shape = result.local_shape()
    if 0 in shape:
        return wrap(nothing(shape, buffer), result)
    with remembered_as_tile(x, buffer, plans):
        return wrap(_MAX[dims - 1](buffer, kernel, strides, 0, dilation), result)


@rule("avg_pool1d")
def avg_pool1d(x: Part, *args: Any, **kwargs: Any) -> Tensor:
    return _average_pool(1, x, *args, **kwargs)


@rule("avg_pool2d")
def avg_pool2d(x: Part, *args: Any, **kwargs: Any) -> Tensor:
    return _average_pool(2, x, *args, **kwargs)


@rule("avg_pool3d")
def avg_pool3d(x: Part, *args: Any, **kwargs: Any) -> Tensor:
    return _average_pool(3, x, *args, **kwargs)


def _average_pool(
    dims: int,
    x: Part,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    image = checked_image(x, dims, f"avg_pool{dims}d")
    more = () if dims == 1 else (divisor_override,)
    if not isinstance(image, Part):
        return _AVERAGE[dims - 1](image, kernel_size, stride, padding, ceil_mode, count_include_pad, *more)
    kernel = per_dim(kernel_size, dims)
    strides, paddings = per_dim(stride or kernel, dims), per_dim(padding, dims)
    windows = [
        Window(kernel[i], strides[i], (paddings[i], paddings[i]), ceil_mode=bool(ceil_mode)) for i in range(dims)
    ]
    layout = x.layout_
    plans = plans_for_windows(layout, windows)
    result = output_layout(layout, [w.output_extent(e) for w, e in zip(windows, layout.shape[2:], strict=True)])
    buffer = fetch(x, plans)
    shape = result.local_shape()
    if 0 in shape:
        return wrap(nothing(shape, buffer), result)
    with remembered_as_tile(x, buffer, plans):
        means = _AVERAGE[dims - 1](buffer, kernel, strides)
    full = torch.Size(kernel).numel()
    if divisor_override is not None:
        return wrap(means * (full / divisor_override), result)
    if not ceil_mode and (count_include_pad or not any(paddings)):
        return wrap(means, result)
    counts = _counts(layout, result, windows, count_include_pad).to(means)
    return wrap(means * (full / counts), result)


def _counts(layout: Layout, result: Layout, windows: Sequence[Window], count_include_pad: bool) -> Tensor:
    """How many elements the window of each of this rank's outputs counts, as in torch's average pools."""
    counts = torch.ones(())
    for number, window in enumerate(windows):
        mine, extent = result.interval(2 + number), layout.shape[2 + number]
        low, high = window.padding
        starts = torch.arange(mine.start, mine.stop) * window.stride - low
        stops = (starts + window.kernel).clamp(max=extent + high)
        if not count_include_pad:
            starts, stops = starts.clamp(min=0), stops.clamp(max=extent)
        counts = counts.unsqueeze(-1) * (stops - starts)
    return counts


def _lp_pool(dims: int, x: Tensor, norm_type: float, kernel_size: Any, stride: Any, ceil_mode: bool) -> Tensor:
    """torch's formula: the norm_type-th root of the sum of powers, kept positive."""
    size = torch.Size(per_dim(kernel_size, dims)).numel()
    means = _AVERAGE[dims - 1](x.pow(norm_type), kernel_size, stride, 0, ceil_mode)
    return (torch.sign(means) * F.relu(torch.abs(means))).mul(size).pow(1.0 / norm_type)


@composed("lp_pool1d")
def lp_pool1d(x: Tensor, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Tensor:
    return _lp_pool(1, x, norm_type, kernel_size, stride, ceil_mode)


@composed("lp_pool2d")
def lp_pool2d(x: Tensor, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Tensor:
    return _lp_pool(2, x, norm_type, kernel_size, stride, ceil_mode)


@composed("lp_pool3d")
def lp_pool3d(x: Tensor, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Tensor:
    return _lp_pool(3, x, norm_type, kernel_size, stride, ceil_mode)
