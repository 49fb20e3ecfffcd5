"""Rules for max, average and Lp pools: a halo exchange, then torch's pool of the tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.geometry import Window
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import composed
from torchmn.sharded.sharding import Sharding
from torchmn.sharded.tensor import ShardedTensor
from torchmn.sharded.windows import image_rule, per_dim, plan_windows, windowed

_AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


@image_rule("max_pool")
def max_pool(
    function: Any,
    x: ShardedTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    if return_indices:
        refuse("max_pool with return_indices=True is not supported on cut images: indices would refer to the tile")
    windows = _windows(len(x.spec.shape) - 2, kernel_size, stride, padding, dilation, ceil_mode)
    kernel, strides, dilations = zip(*[(w.kernel, w.stride, w.dilation) for w in windows], strict=True)
    plan = plan_windows(x.spec, windows)
    return windowed(x, plan, lambda tile: function(tile, kernel, strides, 0, dilations), fill=-torch.inf)


@image_rule("avg_pool")
def average_pool(
    function: Any,
    x: ShardedTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    windows = _windows(len(x.spec.shape) - 2, kernel_size, stride, padding, 1, ceil_mode)
    kernel, strides = zip(*[(w.kernel, w.stride) for w in windows], strict=True)
    plan = plan_windows(x.spec, windows)
    full = torch.Size(kernel).numel()
    counts_all = not ceil_mode and (count_include_pad or not any(w.padding[0] for w in windows))

    def compute(tile: Tensor) -> Tensor:
        means = function(tile, kernel, strides)
        if divisor_override is not None:
            return means * (full / divisor_override)
        if counts_all:
            return means
        return means * (full / _counts(x.spec, plan.result, windows, count_include_pad).to(means))

    return windowed(x, plan, compute)


def _windows(
    dims: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[Window, ...]:
    kernel = per_dim(kernel_size, dims)
    settings = zip(
        kernel, per_dim(stride or kernel, dims), per_dim(padding, dims), per_dim(dilation, dims), strict=True
    )
    return tuple([Window(size, step, (pad, pad), apart, bool(ceil_mode)) for size, step, pad, apart in settings])


def _counts(layout: Sharding, result: Sharding, windows: Sequence[Window], count_include_pad: bool) -> Tensor:
    """Returns the divisor of torch's average pools for each of this rank's outputs: the size of its window."""
    counts = torch.ones(())
    for number, window in enumerate(windows):
        outputs, extent = result.interval(2 + number), layout.shape[2 + number]
        low, high = window.padding
        starts = torch.arange(outputs.start, outputs.stop) * window.stride - low
        stops = (starts + window.kernel).clamp(max=extent + high)
        if not count_include_pad:
            starts, stops = starts.clamp(min=0), stops.clamp(max=extent)
        counts = counts.unsqueeze(-1) * (stops - starts)
    return counts


def _lp_pool(dims: int, x: Tensor, norm_type: float, kernel_size: Any, stride: Any, ceil_mode: bool) -> Tensor:
    """Returns torch's formula: the norm_type-th root of the sum of powers."""
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
