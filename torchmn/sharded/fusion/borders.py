"""The borders of a convolution's tile: which outputs and which taps of the filter each received box reaches.

A convolution is linear, so what a box adds to the outputs can be computed from the box alone. It reaches few of them,
with few taps: that is a small product of matrices, in which torch's own convolutions would spend their time on setting
up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from torch import Tensor

from torchmn.geometry import HaloPlan, Interval


@dataclass(frozen=True)
class ReachOfDim:
    """Along one dim: which outputs a box reaches with which taps, and the strip of inputs that these see.

    offset: of the box in the strip, below zero where the strip begins behind the box's first index
    """

    outputs: Interval
    taps: Interval
    strip: int
    offset: int
    stride: int
    dilation: int


@dataclass(frozen=True)
class Reach:
    """What a received box adds to the outputs, in the terms of a product of matrices. Integers, and how to use them."""

    dims: tuple[ReachOfDim, ...]
    box: tuple[int, ...]  # its image dims

    @cached_property
    def outputs(self) -> tuple:
        """How to index the outputs that the box reaches."""
        return (..., *(dim.outputs.as_slice() for dim in self.dims))

    @cached_property
    def taps(self) -> tuple:
        """How to index the filter's taps that reach it."""
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
        """Whether the box is the strip, without zeros around it."""
        return self.strip_shape == self.box and all(dim.offset == 0 for dim in self.dims)

    @cached_property
    def _column_strides(self) -> tuple[int, ...]:
        """Of the view (*taps, *outputs) of a contiguous strip."""
        steps = [prod(self.strip_shape[at + 1 :]) for at in range(len(self.dims))]
        by_tap = [dim.dilation * step for dim, step in zip(self.dims, steps, strict=True)]
        return (*by_tap, *(dim.stride * step for dim, step in zip(self.dims, steps, strict=True)))

    def strip(self, block: Tensor) -> Tensor:
        """The box in zeros, as far as its outputs see: (batch, channel, *strip_shape), contiguous."""
        if self._is_strip:
            return block.contiguous()
        strip = block.new_zeros((*block.shape[:2], *self.strip_shape))
        strip[self._in_strip] = block[self._in_box]
        return strip

    def block(self, strip: Tensor) -> Tensor:
        """The adjoint of `strip`: (batch, channel, *box)."""
        inner = strip[self._in_strip]
        if inner.shape[2:] == self.box:
            return inner
        block = strip.new_zeros((*strip.shape[:2], *self.box))
        block[self._in_box] = inner
        return block

    def columns(self, strip: Tensor, groups: int) -> Tensor:
        """Per output, what the taps see of a strip: (batch, group, channels of it x taps, outputs)."""
        batch, channels = strip.shape[:2]
        size = prod(self.strip_shape)
        view = strip.as_strided(
            (batch, channels, *self.tap_shape, *self.output_shape), (channels * size, size, *self._column_strides)
        )
        return view.reshape(batch, groups, channels // groups * prod(self.tap_shape), prod(self.output_shape))

    def folded(self, columns: Tensor, channels: int) -> Tensor:
        """The adjoint of `columns`, dim by dim: (batch, channel, *strip_shape)."""
        folded = columns.view(columns.shape[0], channels, *self.tap_shape, *self.output_shape)
        for dim in self.dims:  # its taps are first; its outputs come behind the taps that are left and the folded dims
            folded = _folded_dim(folded, 2 + len(self.dims), dim)
        return folded

    def kernel(self, weight: Tensor, groups: int) -> Tensor:
        """The taps that reach the box: (group, output channels of it, input channels of it x taps)."""
        return weight[self.taps].reshape(groups, weight.shape[0] // groups, weight.shape[1] * prod(self.tap_shape))

    def output_gradient(self, g: Tensor, groups: int) -> Tensor:
        """The gradient of the outputs that the box reaches: (batch, group, output channels of it, outputs)."""
        return g[self.outputs].reshape(g.shape[0], groups, g.shape[1] // groups, prod(self.output_shape))


def _folded_dim(columns: Tensor, outputs_at: int, dim: ReachOfDim) -> Tensor:
    """Add up along one dim what taps (dim 2) of outputs (dim `outputs_at`) give to each index of the strip."""
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
    """A tile's convolution in two parts: torch's own, with `padding`, and what each received box adds to it.

    padding: that torch adds to the tile, at both ends of each dim
    reaches: of each received box, in the order in which they come; None where it reaches no output
    """

    padding: tuple[int, ...]
    reaches: tuple[Reach | None, ...]
    box_counts: tuple[tuple[int, int], ...]  # (peer, how many boxes come from it)
    box_shapes: tuple[tuple[int, ...], ...]

    def by_peer(self, blocks: Sequence[Tensor | None], like: Tensor) -> dict[int, list[Tensor]]:
        """Per peer, the gradients of its boxes; zeros where a box reaches nothing."""
        filled = (
            like.new_zeros((*like.shape[:2], *shape)) if block is None else block
            for block, shape in zip(blocks, self.box_shapes, strict=True)
        )
        return {peer: [next(filled) for _ in range(count)] for peer, count in self.box_counts}


@lru_cache(maxsize=4096)
def borders_of(
    plan: HaloPlan, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Borders | None:
    """The two parts of this rank's convolution; None where torch's padding can not give the first of them."""
    padding, counts = [], []
    for dim, at, taps, step, spread in zip(plan.dims, plan.place, kernel, stride, dilation, strict=True):
        own, needed, span = dim.owned[at], dim.needed[at], spread * (taps - 1) + 1
        low, outputs = own.start - needed.start, (len(needed) - span) // step + 1
        # Padding beyond the image is zero only in mode "zeros". torch pads both ends with `low`; what is too much at
        # the high end must not make more outputs, and what is too little must not make fewer.
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


def _reach(box: Interval, outputs: int, kernel: int, stride: int, dilation: int) -> ReachOfDim | None:
    """Along one dim, in indices of the buffer; None if no tap of any output falls into the box."""
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
    return ReachOfDim(
        Interval(first, last + 1), Interval(low, high + 1), stop - start, box.start - start, stride, dilation
    )
