"""Reach: which outputs and taps of a convolution a received box of halo contributes to, as a matrix product.

A convolution is linear, so the contribution of a box to the outputs can be computed from the box alone. It contributes
to few outputs, with few taps: a small matrix product, for which torch's convolutions would mostly spend setup time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from torch import Tensor

from torchmn.geometry import HaloPlan, Interval


@dataclass(frozen=True)
class DimReach:
    """The reach of a box along one dim.

    Attributes:
        outputs: to which the box contributes.
        taps: with which it does.
        strip: the number of inputs that these outputs depend on with these taps.
        offset: of the box in that strip; negative if the strip begins after the box's first index.
        stride, dilation: of the convolution.
    """

    outputs: Interval
    taps: Interval
    strip: int
    offset: int
    stride: int
    dilation: int


@dataclass(frozen=True)
class Reach:
    """The contribution of a received box to the outputs, as a matrix product.

    Attributes:
        dims: the reach along each image dim.
        box: the image dims of the box.
    """

    dims: tuple[DimReach, ...]
    box: tuple[int, ...]

    @cached_property
    def outputs(self) -> tuple:
        """Index of the outputs that the box contributes to."""
        return (..., *(dim.outputs.as_slice() for dim in self.dims))

    @cached_property
    def taps(self) -> tuple:
        """Index of the filter's taps with which it contributes."""
        return (..., *(dim.taps.as_slice() for dim in self.dims))

    @cached_property
    def tap_shape(self) -> tuple[int, ...]:
        return tuple(len(dim.taps) for dim in self.dims)

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        return tuple(len(dim.outputs) for dim in self.dims)

    @cached_property
    def strip_shape(self) -> tuple[int, ...]:
        return tuple(dim.strip for dim in self.dims)

    @cached_property
    def _in_strip(self) -> tuple:
        ends = [
            (max(0, dim.offset), min(dim.strip, dim.offset + n)) for dim, n in zip(self.dims, self.box, strict=True)
        ]
        return (..., *(slice(start, stop) for start, stop in ends))

    @cached_property
    def _in_box(self) -> tuple:
        shifts = [-dim.offset for dim in self.dims]
        return (
            ...,
            *(slice(s.start + by, s.stop + by) for s, by in zip(self._in_strip[1:], shifts, strict=True)),
        )

    @cached_property
    def _is_strip(self) -> bool:
        """Whether box and strip are the same."""
        return self.strip_shape == self.box and all(dim.offset == 0 for dim in self.dims)

    @cached_property
    def _column_strides(self) -> tuple[int, ...]:
        """Strides of the view (*taps, *outputs) of a contiguous strip."""
        steps = [prod(self.strip_shape[at + 1 :]) for at in range(len(self.dims))]
        by_tap = [dim.dilation * step for dim, step in zip(self.dims, steps, strict=True)]
        return (*by_tap, *(dim.stride * step for dim, step in zip(self.dims, steps, strict=True)))

    def strip(self, block: Tensor) -> Tensor:
        """Returns the strip of inputs with the box, zeros elsewhere: (batch, channel, *strip_shape), contiguous."""
        if self._is_strip:
            return block.contiguous()
        strip = block.new_zeros((*block.shape[:2], *self.strip_shape))
        strip[self._in_strip] = block[self._in_box]
        return strip

    def block(self, strip: Tensor) -> Tensor:
        """Returns the adjoint of `strip`: (batch, channel, *box)."""
        inner = strip[self._in_strip]
        if inner.shape[2:] == self.box:
            return inner
        block = strip.new_zeros((*strip.shape[:2], *self.box))
        block[self._in_box] = inner
        return block

    def columns(self, strip: Tensor, groups: int) -> Tensor:
        """Returns the inputs of each output: (batch, group, channels of the group x taps, outputs)."""
        batch, channels = strip.shape[:2]
        size = prod(self.strip_shape)
        view = strip.as_strided(
            (batch, channels, *self.tap_shape, *self.output_shape), (channels * size, size, *self._column_strides)
        )
        return view.reshape(batch, groups, channels // groups * prod(self.tap_shape), prod(self.output_shape))

    def fold(self, columns: Tensor, channels: int) -> Tensor:
        """Returns the adjoint of `columns`: (batch, channel, *strip_shape)."""
        fold = columns.view(columns.shape[0], channels, *self.tap_shape, *self.output_shape)
        for dim in self.dims:  # its taps are in dim 2; its outputs follow the remaining taps and the folded dims
            fold = _fold_dim(fold, 2 + len(self.dims), dim)
        return fold

    def kernel(self, weight: Tensor, groups: int) -> Tensor:
        """Returns the taps of the weight: (group, output channels of the group, its input channels x taps)."""
        return weight[self.taps].reshape(groups, weight.shape[0] // groups, weight.shape[1] * prod(self.tap_shape))

    def output_gradient(self, g: Tensor, groups: int) -> Tensor:
        """Returns the gradient of the outputs: (batch, group, output channels of the group, outputs)."""
        return g[self.outputs].reshape(g.shape[0], groups, g.shape[1] // groups, prod(self.output_shape))


def _fold_dim(columns: Tensor, outputs_at: int, dim: DimReach) -> Tensor:
    """Returns the sum, for each index of the strip, over taps (dim 2) and outputs (dim `outputs_at`) along one dim."""
    if len(dim.taps) == 1 and len(dim.outputs) == dim.strip:
        return columns.select(2, 0)
    shape = [*columns.shape[:2], *columns.shape[3:]]
    shape[outputs_at - 1] = dim.strip
    strip = columns.new_zeros(shape)
    reach = dim.stride * (len(dim.outputs) - 1) + 1
    before = (slice(None),) * (outputs_at - 1)
    for tap, share in enumerate(columns.unbind(2)):
        start = dim.dilation * tap
        strip[(*before, slice(start, start + reach, dim.stride))].add_(share)
    return strip


@dataclass(frozen=True)
class Borders:
    """A tile's convolution as torch's convolution of the tile plus the contribution of each received box.

    Attributes:
        padding: that torch adds to the tile, at both ends of each dim.
        reaches: of each received box, in the order of `HaloPlan.receives`; None if it contributes to no output.
        box_counts: (peer, number of boxes from it).
        box_shapes: the image dims of each box.
    """

    padding: tuple[int, ...]
    reaches: tuple[Reach | None, ...]
    box_counts: tuple[tuple[int, int], ...]
    box_shapes: tuple[tuple[int, ...], ...]

    def by_peer(self, blocks: Sequence[Tensor | None], like: Tensor) -> dict[int, list[Tensor]]:
        """Returns by peer the gradients of its boxes; zeros for a box that contributes to no output."""
        filled = (
            like.new_zeros((*like.shape[:2], *shape)) if block is None else block
            for block, shape in zip(blocks, self.box_shapes, strict=True)
        )
        return {peer: [next(filled) for _ in range(count)] for peer, count in self.box_counts}


@lru_cache(maxsize=4096)
def borders_of(
    plan: HaloPlan, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Borders | None:
    """Returns this rank's convolution as such a sum; None if torch's padding does not suit the tile."""
    padding, counts = [], []
    for dim, at, taps, step, spread in zip(plan.dims, plan.place, kernel, stride, dilation, strict=True):
        own, needed, span = dim.owned[at], dim.needed[at], spread * (taps - 1) + 1
        low, outputs = own.start - needed.start, (len(needed) - span) // step + 1
        # Padding beyond the image is zero only in mode "zeros". torch pads both ends with `low`, which must not change
        # the number of outputs at the high end.
        fits = dim.padding_mode == "zeros" and bool(own) and bool(needed) and low >= 0
        if not fits or len(own) + 2 * low < span or (len(own) + 2 * low - span) // step + 1 != outputs:
            return None
        padding.append(low)
        counts.append(outputs)
    boxes = [box for boxes in plan.receives.values() for box in boxes]
    reaches = []
    for box in boxes:
        dims = [
            _reach(interval, *settings)
            for interval, *settings in zip(box.target, counts, kernel, stride, dilation, strict=True)
        ]
        known = tuple(dim for dim in dims if dim is not None)
        reaches.append(Reach(known, box.target_shape) if len(known) == len(dims) else None)
    return Borders(
        tuple(padding),
        tuple(reaches),
        tuple((peer, len(boxes)) for peer, boxes in plan.receives.items()),
        tuple(box.target_shape for box in boxes),
    )


def _reach(box: Interval, outputs: int, kernel: int, stride: int, dilation: int) -> DimReach | None:
    """Returns the reach along one dim, in indices of the buffer; None if no output depends on the box."""
    pairs = [
        (output, tap)
        for output in range(outputs)
        for tap in range(kernel)
        if box.start <= output * stride + tap * dilation < box.stop
    ]
    if not pairs:
        return None
    first, last = min(output for output, _ in pairs), max(output for output, _ in pairs)
    low, high = min(tap for _, tap in pairs), max(tap for _, tap in pairs)
    start = first * stride + low * dilation
    stop = last * stride + high * dilation + 1
    return DimReach(
        Interval(first, last + 1), Interval(low, high + 1), stop - start, box.start - start, stride, dilation
    )
