"""Rules for adaptive and global pools, whose bins depend on the global extent."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from torchmn.geometry import Interval
from torchmn.sharded.exchange import image_cut
from torchmn.sharded.memory_format import with_memory_format_of
from torchmn.sharded.refusals import refuse
from torchmn.sharded.replicated import sum_over_shards
from torchmn.sharded.sharding import Sharding
from torchmn.sharded.tensor import ShardedTensor, local
from torchmn.sharded.windows import image_rule, plan_needs, windowed


@image_rule("adaptive_avg_pool")
def average(function: Any, x: ShardedTensor, output_size: Any) -> Tensor:
    """Returns the mean of each bin: cut, if there are at least as many bins as ranks along every axis; else whole."""
    layout = x.spec
    sizes = _sizes(layout, output_size)
    if _enough_for_all(layout, sizes):
        return _sharded_average(x, sizes)
    # Each rank multiplies its tile, dim by dim, with its columns of the matrix that averages over bins. The sum over
    # ranks is the global result.
    result = _wide(local(x))
    for number, bins in enumerate(sizes):
        columns = _averaging_matrix(layout.shape[2 + number], bins)[:, layout.interval(2 + number).as_slice()]
        result = _multiplied(result, columns, 2 + number)
    return sum_over_shards(with_memory_format_of(result, local(x)), layout.grid.tiles).to(x.dtype)


def _sharded_average(x: ShardedTensor, sizes: list[int]) -> ShardedTensor:
    spec = x.spec
    bins = [_bins(spec.shape[2 + number], size) for number, size in enumerate(sizes)]

    def needed(number: int, outputs: Interval) -> Interval:
        return Interval(bins[number][outputs.start][0], bins[number][outputs.stop - 1][1])

    plan = plan_needs(spec, sizes, needed)

    def compute(tile: Tensor) -> Tensor:
        means = _wide(tile)
        for number, size in enumerate(sizes):
            outputs = plan.result.interval(2 + number)
            matrix = _averaging_matrix(spec.shape[2 + number], size)
            means = _multiplied(means, matrix[outputs.as_slice(), needed(number, outputs).as_slice()], 2 + number)
        return with_memory_format_of(means, local(x)).to(x.dtype)

    return windowed(x, plan, compute)


def _enough_for_all(layout: Sharding, sizes: list[int]) -> bool:
    """Whether every cut dim has at least as many bins as ranks."""
    cuts = zip(layout.cuts[2:], sizes, strict=True)
    return bool(layout.cut_dims) and all(cut is None or len(image_cut(cut).intervals) <= size for cut, size in cuts)


def _wide(x: Tensor) -> Tensor:
    """Returns float32 for half precision, in which torch sums these too."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _multiplied(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        return torch.movedim(torch.movedim(x, dim, -1) @ matrix.T.to(x), -1, dim)


@image_rule("adaptive_max_pool")
def maximum(function: Any, x: ShardedTensor, output_size: Any, return_indices: bool = False) -> Any:
    """Returns the maximum of each bin, whole. The gradient goes to the first of equal elements, as in torch."""
    if return_indices:
        refuse("adaptive max pool with return_indices=True is not supported on cut images")
    layout = x.spec
    sizes = _sizes(layout, output_size)
    tile, comm = local(x), layout.grid.tiles
    if tile.is_meta:
        return tile.new_empty((*layout.shape[:2], *sizes)) + tile.sum()
    values, order = tile, _global_order(layout).to(tile.device).expand(tile.shape)
    for number, bins in enumerate(sizes):
        values, order = _best_in_bins(values, order, 2 + number, layout, bins)
    with torch.no_grad():
        best = comm.allreduce(values, "max")
        after_all = torch.Size(layout.shape[2:]).numel()
        first = comm.allreduce(torch.where(values == best, order, after_all), "min")
        chosen = (values == best) & (order == first) | values.isnan()
    shares = torch.where(chosen, values, values.new_zeros(()))
    # A rank with an empty tile must take part in the backward of the others.
    return with_memory_format_of(sum_over_shards(shares + tile.narrow(0, 0, 0).sum(), comm), tile)


def _sizes(layout: Sharding, output_size: Any) -> list[int]:
    extents = layout.shape[2:]
    sizes = [output_size] * len(extents) if isinstance(output_size, int | None) else list(output_size)
    sizes = sizes * len(extents) if len(sizes) == 1 else sizes
    sizes = [extent if size is None else size for size, extent in zip(sizes, extents, strict=True)]
    if min(sizes) < 1:
        refuse(f"adaptive pool of {layout} to {sizes}: expected output sizes of at least 1")
    return sizes


def _bins(extent: int, bins: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of each bin by torch's formula. Neighbouring bins may overlap."""
    return [(at * extent // bins, -(-(at + 1) * extent // bins)) for at in range(bins)]


def _averaging_matrix(extent: int, bins: int) -> Tensor:
    matrix = torch.zeros(bins, extent, dtype=torch.float64)
    for at, (start, stop) in enumerate(_bins(extent, bins)):
        matrix[at, start:stop] = 1.0 / (stop - start)
    return matrix


def _global_order(layout: Sharding) -> Tensor:
    """Returns the index of each of this rank's elements in the flattened global image."""
    extents = layout.shape[2:]
    everything = torch.arange(torch.Size(extents).numel()).view(extents)
    return everything[tuple(layout.interval(2 + number).as_slice() for number in range(len(extents)))]


def _best_in_bins(values: Tensor, order: Tensor, dim: int, layout: Sharding, bins: int) -> tuple[Tensor, Tensor]:
    """Returns the largest value of each bin along a dim (the first of equal ones) and its order; -inf for no value."""
    owned = layout.interval(dim)
    spans = [
        (max(a, owned.start) - owned.start, min(b, owned.stop) - owned.start) for a, b in _bins(layout.shape[dim], bins)
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
