"""Adaptive and global pools: bins whose borders depend on the global extent."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.functions.replicated import sum_of_parts
from torchmn.nn.parts.layout import Layout
from torchmn.nn.parts.moving import whole
from torchmn.nn.parts.part import Part, local
from torchmn.nn.parts.refusals import refuse
from torchmn.nn.parts.rules.registry import rule


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_average_pool(x: Part, output_size: Any) -> Tensor:
    """The mean of each bin. The result is small and goes to every rank whole.

    Each rank multiplies its tile, dim by dim, with its columns of the matrix that averages over bins; the sum over
    ranks is the global result.
    """
    layout = x.layout_
    sizes = _sizes(layout, output_size)
    if not layout.is_tile:
        return _serial(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, layout)(whole(x), sizes)
    result = local(x)
    for number, bins in enumerate(sizes):
        dim = 2 + number
        matrix = _averaging(layout.shape[dim], bins).to(result)[:, layout.interval(dim).as_slice()]
        result = torch.movedim(torch.movedim(result, dim, -1) @ matrix.T, -1, dim)
    return sum_of_parts(result, layout.grid.tiles)


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(x: Part, output_size: Any, return_indices: bool = False) -> Tensor:
    """The maximum of each bin, on every rank; the gradient goes to the first of equal ones, as torch's does."""
    layout = x.layout_
    sizes = _sizes(layout, output_size)
    if not layout.is_tile:
        serial = _serial(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d, layout)
        return serial(whole(x), sizes, return_indices)
    if return_indices:
        refuse("adaptive max pool with return_indices=True is not supported on cut images")
    mine, comm = local(x), layout.grid.tiles
    if mine.is_meta:
        return mine.new_empty((*layout.shape[:2], *sizes)) + mine.sum()
    values, order = mine, _global_order(layout).to(mine.device).expand(mine.shape)
    for number, bins in enumerate(sizes):
        values, order = _best_in_bins(values, order, 2 + number, layout, bins)
    with torch.no_grad():
        best = comm.allreduce(values, "max")
        none = torch.Size(layout.shape[2:]).numel()
        first = comm.allreduce(torch.where(values == best, order, none), "min")
        chosen = (values == best) & (order == first)
    return sum_of_parts(torch.where(chosen, values, values.new_zeros(())), comm)


def _sizes(layout: Layout, output_size: Any) -> list[int]:
    extents = layout.shape[2:]
    sizes = [output_size] * len(extents) if isinstance(output_size, int | None) else list(output_size)
    sizes = sizes * len(extents) if len(sizes) == 1 else sizes
    return [extent if size is None else size for size, extent in zip(sizes, extents, strict=True)]


def _serial(one: Any, two: Any, three: Any, layout: Layout) -> Any:
    return (one, two, three)[len(layout.shape) - 3]


def _bins(extent: int, bins: int) -> list[tuple[int, int]]:
    """First and last index (and one) of each bin: torch's formula; neighbours may overlap."""
    return [(at * extent // bins, -(-(at + 1) * extent // bins)) for at in range(bins)]


def _averaging(extent: int, bins: int) -> Tensor:
    matrix = torch.zeros(bins, extent, dtype=torch.float64)
    for at, (start, stop) in enumerate(_bins(extent, bins)):
        matrix[at, start:stop] = 1.0 / (stop - start)
    return matrix


def _global_order(layout: Layout) -> Tensor:
    """The place of each of this rank's elements in the row-major order of the whole image."""
    extents = layout.shape[2:]
    everything = torch.arange(torch.Size(extents).numel()).view(extents)
    return everything[tuple(layout.interval(2 + number).as_slice() for number in range(len(extents)))]


def _best_in_bins(values: Tensor, order: Tensor, dim: int, layout: Layout, bins: int) -> tuple[Tensor, Tensor]:
    """The largest value of each bin along a dim (the first of equal ones), and its order; -inf where none is here."""
    mine = layout.interval(dim)
    spans = [
        (max(a, mine.start) - mine.start, min(b, mine.stop) - mine.start) for a, b in _bins(layout.shape[dim], bins)
    ]
    found = [_best(values, order, dim, start, stop) for start, stop in spans]
    return torch.stack([value for value, _ in found], dim), torch.stack([at for _, at in found], dim)


def _best(values: Tensor, order: Tensor, dim: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    if stop <= start:
        empty = values.select(dim, 0) if values.shape[dim] else values.sum(dim)
        return torch.full_like(empty, -torch.inf), torch.zeros_like(empty, dtype=torch.long)
    window, places = values.narrow(dim, start, stop - start), order.narrow(dim, start, stop - start)
    best = window.amax(dim, keepdim=True).detach()
    earliest = torch.where(window == best, places, torch.iinfo(torch.long).max).argmin(dim, keepdim=True)
    return window.gather(dim, earliest).squeeze(dim), places.gather(dim, earliest).squeeze(dim)
