"""Adaptive and global pools: bins whose borders depend on the global extent."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from torchmn.geometry import Interval
from torchmn.sharded.images import image_rule
from torchmn.sharded.memory import in_memory_as
from torchmn.sharded.refusals import refuse
from torchmn.sharded.replicated import sum_of_parts
from torchmn.sharded.sharding import Sharding
from torchmn.sharded.tensor import ShardedTensor, local
from torchmn.sharded.windows import plan_needs, windowed


@image_rule("adaptive_avg_pool")
def average(function: Any, x: ShardedTensor, output_size: Any) -> Tensor:
    """The mean of each bin. Where every rank gets bins of its own the result stays cut; else it goes to all, whole."""
    layout = x.spec
    sizes = _sizes(layout, output_size)
    if _enough_for_all(layout, sizes):
        return _average_in_parts(x, sizes)
    # Each rank multiplies its tile, dim by dim, with its columns of the matrix that averages over bins; the sum over
    # ranks is the global result.
    result = _wide(local(x))
    for number, bins in enumerate(sizes):
        columns = _averaging(layout.shape[2 + number], bins)[:, layout.interval(2 + number).as_slice()]
        result = _multiplied(result, columns, 2 + number)
    return sum_of_parts(in_memory_as(result, local(x)), layout.grid.tiles).to(x.dtype)


def _average_in_parts(x: ShardedTensor, sizes: list[int]) -> ShardedTensor:
    spec = x.spec
    bins = [_bins(spec.shape[2 + number], size) for number, size in enumerate(sizes)]

    def needed(number: int, mine: Interval) -> Interval:
        return Interval(bins[number][mine.start][0], bins[number][mine.stop - 1][1])

    plan = plan_needs(spec, sizes, needed)

    def compute(tile: Tensor) -> Tensor:
        means = _wide(tile)
        for number, size in enumerate(sizes):
            mine = plan.result.interval(2 + number)
            rows = _averaging(spec.shape[2 + number], size)[mine.as_slice(), needed(number, mine).as_slice()]
            means = _multiplied(means, rows, 2 + number)
        return in_memory_as(means, local(x)).to(x.dtype)

    return windowed(x, plan, compute)


def _enough_for_all(layout: Sharding, sizes: list[int]) -> bool:
    """Whether every cut dim has at least as many bins as ranks."""
    cuts = zip(layout.cuts[2:], sizes, strict=True)
    return bool(layout.cut_dims) and all(cut is None or len(cut.intervals) <= size for cut, size in cuts)  # type: ignore[union-attr]


def _wide(x: Tensor) -> Tensor:
    """Torch adds up small floats in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _multiplied(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        return torch.movedim(torch.movedim(x, dim, -1) @ matrix.T.to(x), -1, dim)


@image_rule("adaptive_max_pool")
def maximum(function: Any, x: ShardedTensor, output_size: Any, return_indices: bool = False) -> Any:
    """The maximum of each bin, on every rank; the gradient goes to the first of equal ones, as torch's does."""
    if return_indices:
        refuse("adaptive max pool with return_indices=True is not supported on cut images")
    layout = x.spec
    sizes = _sizes(layout, output_size)
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
        chosen = (values == best) & (order == first) | values.isnan()
    shares = torch.where(chosen, values, values.new_zeros(()))
    # A rank without a part must take part in the backward of the others.
    return in_memory_as(sum_of_parts(shares + mine.narrow(0, 0, 0).sum(), comm), mine)


def _sizes(layout: Sharding, output_size: Any) -> list[int]:
    extents = layout.shape[2:]
    sizes = [output_size] * len(extents) if isinstance(output_size, int | None) else list(output_size)
    sizes = sizes * len(extents) if len(sizes) == 1 else sizes
    sizes = [extent if size is None else size for size, extent in zip(sizes, extents, strict=True)]
    if min(sizes) < 1:
        refuse(f"adaptive pool of {layout} to {sizes}: nothing would be left")
    return sizes


def _bins(extent: int, bins: int) -> list[tuple[int, int]]:
    """First and last index (and one) of each bin: torch's formula; neighbours may overlap."""
    return [(at * extent // bins, -(-(at + 1) * extent // bins)) for at in range(bins)]


def _averaging(extent: int, bins: int) -> Tensor:
    matrix = torch.zeros(bins, extent, dtype=torch.float64)
    for at, (start, stop) in enumerate(_bins(extent, bins)):
        matrix[at, start:stop] = 1.0 / (stop - start)
    return matrix


def _global_order(layout: Sharding) -> Tensor:
    """The place of each of this rank's elements in the row-major order of the whole image."""
    extents = layout.shape[2:]
    everything = torch.arange(torch.Size(extents).numel()).view(extents)
    return everything[tuple(layout.interval(2 + number).as_slice() for number in range(len(extents)))]


def _best_in_bins(values: Tensor, order: Tensor, dim: int, layout: Sharding, bins: int) -> tuple[Tensor, Tensor]:
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
    earliest = torch.where((window == best) | window.isnan(), places, torch.iinfo(torch.long).max).argmin(
        dim, keepdim=True
    )
    return window.gather(dim, earliest).squeeze(dim), places.gather(dim, earliest).squeeze(dim)
