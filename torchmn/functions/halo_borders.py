"""The borders of a convolution's tile: which outputs halos reach, and the strips of halo that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from torchmn.geometry import BoxCopy, HaloPlan, Interval

Box = tuple[Interval, ...]


@dataclass(frozen=True)
class Overlap:
    """Where a strip and a received box overlap: how to index each of them, leading dims whole."""

    in_strip: tuple
    in_block: tuple


@dataclass(frozen=True)
class Borders:
    """A tile's convolution in two parts: torch's own, with `padding`, and one for each strip along the borders.

    padding: that torch adds to the tile, at both ends of each dim
    outputs: how to index the outputs that a strip adds to; they do not overlap
    strip_shapes: of the image dims of each strip
    overlaps: per strip and received box, where they overlap; None if they do not
    """

    padding: tuple[int, ...]
    outputs: tuple[tuple, ...]
    strip_shapes: tuple[tuple[int, ...], ...]
    overlaps: tuple[tuple[Overlap | None, ...], ...]
    box_counts: tuple[tuple[int, int], ...]  # (peer, how many boxes come from it)
    box_shapes: tuple[tuple[int, ...], ...]

    def strips(self, x: Tensor, received: Sequence[tuple[BoxCopy, Tensor]]) -> list[Tensor]:
        """The halos along each border, in zeros."""
        strips = []
        for shape, overlaps in zip(self.strip_shapes, self.overlaps, strict=True):
            strip = x.new_zeros((*x.shape[:2], *shape))
            for overlap, (_, block) in zip(overlaps, received, strict=True):
                if overlap is not None:
                    strip[overlap.in_strip] = block[overlap.in_block]
            strips.append(strip)
        return strips

    def blocks(self, x: Tensor, strips: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """The adjoint of `strips`: per peer, the gradient of each of its boxes."""
        blocks = [torch.zeros((*x.shape[:2], *shape), dtype=x.dtype, device=x.device) for shape in self.box_shapes]
        for strip, overlaps in zip(strips, self.overlaps, strict=True):
            for overlap, block in zip(overlaps, blocks, strict=True):
                if overlap is not None:
                    block[overlap.in_block].add_(strip[overlap.in_strip])
        each = iter(blocks)
        return {peer: [next(each) for _ in range(count)] for peer, count in self.box_counts}


@lru_cache(maxsize=4096)
def borders_of(
    plan: HaloPlan, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Borders | None:
    """The two parts of this rank's convolution; None where torch's padding can not give the first of them."""
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding, outer, whole = [], [], []
    for dim, at, step, span in zip(plan.dims, plan.place, stride, spans, strict=True):
        own, needed = dim.owned[at], dim.needed[at]
        low, outputs = own.start - needed.start, (len(needed) - span) // step + 1
        # Padding beyond the image is zero only in mode "zeros". torch pads both ends with `low`; what is too much at
        # the high end must not make more outputs, and what is too little must not make fewer.
        fits = dim.padding_mode == "zeros" and bool(own) and bool(needed) and low >= 0
        if not fits or len(own) + 2 * low < span or (len(own) + 2 * low - span) // step + 1 != outputs:
            return None
        padding.append(low)
        whole.append(Interval(0, outputs))
        outer.append(_reached(dim.extent, own, needed, outputs, step, span))
    outputs = _frame(whole, outer)
    strips = [
        tuple(Interval(o.start * s, (o.stop - 1) * s + span) for o, s, span in zip(box, stride, spans, strict=True))
        for box in outputs
    ]
    boxes = [box for boxes in plan.receives.values() for box in boxes]
    return Borders(
        tuple(padding),
        tuple((..., *(interval.as_slice() for interval in box)) for box in outputs),
        tuple(tuple(len(interval) for interval in strip) for strip in strips),
        tuple(tuple(_overlap(strip, box.target) for box in boxes) for strip in strips),
        tuple((peer, len(boxes)) for peer, boxes in plan.receives.items()),
        tuple(box.target_shape for box in boxes),
    )


def _reached(extent: int, own: Interval, needed: Interval, outputs: int, step: int, span: int) -> list[Interval]:
    """The outputs along one dim that need another rank's elements: at the low end, at the high end, or all."""
    low = own.start - needed.start
    first = -(-low // step) if needed.start < own.start and own.start > 0 else 0  # outputs that begin before the tile
    last = outputs
    if needed.stop > own.stop and own.stop < extent:
        last = max(0, (low + len(own) - span) // step + 1)  # outputs from here on end behind it
    if first >= last:
        return [Interval(0, outputs)]
    return [interval for interval in (Interval(0, first), Interval(last, outputs)) if interval]


def _frame(whole: Sequence[Interval], outer: Sequence[list[Interval]]) -> list[Box]:
    """Boxes that cover every place that is in an outer interval of any dim, and that do not overlap."""
    boxes = []
    middle: list[Interval] = []
    for at, ends in enumerate(outer):
        boxes += [(*middle, end, *whole[at + 1 :]) for end in ends]
        start = max((end.stop for end in ends if end.start == 0), default=0)
        stop = min((end.start for end in ends if end.start > 0), default=whole[at].stop)
        middle.append(Interval(start, stop))
    return [box for box in boxes if all(box)]


def _overlap(strip: Box, target: Box) -> Overlap | None:
    common = [a.intersection(b) for a, b in zip(strip, target, strict=True)]
    if not all(common):
        return None
    in_strip = (..., *(c.shift(-a.start).as_slice() for c, a in zip(common, strip, strict=True)))
    in_block = (..., *(c.shift(-b.start).as_slice() for c, b in zip(common, target, strict=True)))
    return Overlap(in_strip, in_block)
