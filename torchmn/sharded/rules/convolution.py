"""Rules for convolutions and transposed convolutions: a halo exchange, then torch's convolution of the tile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from torchmn.geometry import Interval, Window
from torchmn.sharded.redistribute import replicated_operand
from torchmn.sharded.tensor import ShardedTensor
from torchmn.sharded.windows import image_rule, per_dim, plan_needs, plan_windows, windowed


@image_rule("conv")
def convolution(
    function: Any,
    x: ShardedTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    plan = plan_windows(x.spec, windows_of(weight.shape, stride, padding, dilation), weight.shape[0])
    weight, bias = parameters_of(x, weight, bias)
    return windowed(x, plan, lambda tile: function(tile, weight, bias, stride, 0, dilation, groups), weight, bias)


def parameters_of(x: ShardedTensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias as operands of the tile of `x`."""
    return replicated_operand(weight, x.spec), None if bias is None else replicated_operand(bias, x.spec)


def windows_of(
    weight: Sequence[int], stride: Any, padding: Any, dilation: Any, output_padding: Any = None
) -> tuple[Window, ...]:
    """Returns the windows of a convolution, one per image dim; with `output_padding`, of a transposed convolution.

    Args:
        weight: its shape.
    """
    settings = [tuple(value) if isinstance(value, list) else value for value in (stride, padding, dilation)]
    return _windows(tuple(weight[2:]), *settings, output_padding)


@lru_cache(maxsize=4096)
def _windows(
    kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, output_padding: Any
) -> tuple[Window, ...]:
    dims = len(kernel)
    stride, dilation, extra = (per_dim(value, dims) for value in (stride, dilation, output_padding or 0))
    return tuple(
        Window(
            kernel[i],
            stride[i],
            _padding(padding, i, dims, kernel[i], dilation[i]),
            dilation[i],
            transposed=output_padding is not None,
            output_padding=extra[i],
        )
        for i in range(dims)
    )


def _padding(padding: Any, number: int, dims: int, kernel: int, dilation: int) -> tuple[int, int]:
    if padding == "valid":
        return (0, 0)
    if padding == "same":
        total = dilation * (kernel - 1)
        return (total // 2, total - total // 2)
    amount = per_dim(padding, dims)[number]
    return (amount, amount)


@image_rule("conv_transpose")
def transposed_convolution(
    function: Any,
    x: ShardedTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    extra = tuple(output_padding) if isinstance(output_padding, list) else output_padding
    windows = windows_of(weight.shape, stride, padding, dilation, extra)
    extents = [window.output_extent(extent) for window, extent in zip(windows, x.spec.shape[2:], strict=True)]
    channels = weight.shape[1] * groups
    plan = plan_needs(x.spec, extents, lambda number, outputs: _covering(windows[number], outputs), channels)
    weight, bias = parameters_of(x, weight, bias)

    def compute(tile: Tensor) -> Tensor:
        everything = function(tile, weight, bias, stride, 0, 0, groups, dilation)
        # The first output that the tile's inputs reach, `first`, may be before this rank's first output.
        for dim, window in enumerate(windows, start=2):
            outputs = plan.result.interval(dim)
            first = _covering(window, outputs).start * window.stride - window.padding[0]
            everything = everything.narrow(dim, outputs.start - first, len(outputs))
        return everything

    return windowed(x, plan, compute, weight, bias)


def _covering(window: Window, outputs: Interval) -> Interval:
    """Returns the inputs, with zeros beyond the image, whose outputs cover `outputs`, even those without a tap."""
    low = window.padding[0]
    start = (outputs.start + low - window.span + 1) // window.stride
    stop = (outputs.stop - 1 + low) // window.stride + 1
    while (stop - 1) * window.stride - low + window.span < outputs.stop:
        stop += 1
    return Interval(start, stop)
