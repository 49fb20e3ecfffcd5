"""Rules for indexing and slicing. Slices of cut dims are redistributed, so that the result is cut evenly again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.sharded.redistribute import whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import rule
from torchmn.sharded.rules.padding import at_indices
from torchmn.sharded.sharding import Sharding
from torchmn.sharded.tensor import ShardedTensor, local, wrap


@rule("__getitem__")
def getitem(x: ShardedTensor, index: Any) -> Tensor:
    if x.spec.grid.sizes["data"] > 1 and not _keeps_batch(_full_index(index, x.spec)[0]):
        refuse(
            f"an index of the batch dim, or a new dim before it, is not supported for {x.spec} on a grid with the axis "
            "data: ranks have different samples"
        )
    if not x.spec.is_tile:
        return whole(x)[index]
    index = _full_index(index, x.spec)
    new_dims = [at for at, entry in enumerate(index) if entry is None]
    entries = [entry for entry in index if entry is not None]
    _check(entries, x.spec)
    x = _slice_cut_dims(x, entries)
    layout = x.spec
    local_index = tuple(entry if layout.cuts[dim] is None else slice(None) for dim, entry in enumerate(entries))
    kept = [dim for dim, entry in enumerate(entries) if isinstance(entry, slice)]
    result = local(x)[local_index]
    extents = [layout.shape[dim] if layout.cuts[dim] is not None else result.shape[at] for at, dim in enumerate(kept)]
    cuts = [layout.cuts[dim] for dim in kept]
    for at in new_dims:
        at -= sum(isinstance(entry, int) for entry in index[:at])
        result = result.unsqueeze(at)
        extents.insert(at, 1)
        cuts.insert(at, None)
    return wrap(result, layout.with_dims(tuple(extents), tuple(cuts)))


def _keeps_batch(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def _full_index(index: Any, layout: Sharding) -> tuple:
    """Returns one entry per dim, and the Nones, which insert dims."""
    index = index if isinstance(index, tuple) else (index,)
    taken = sum(entry is not None and entry is not Ellipsis for entry in index)
    rest = [slice(None)] * (len(layout.shape) - taken)
    for at, entry in enumerate(index):
        if entry is Ellipsis:
            return (*index[:at], *rest, *index[at + 1 :])
    return (*index, *rest)


def _check(entries: Sequence[Any], layout: Sharding) -> None:
    if len(entries) != len(layout.shape):
        refuse(f"too many indices for {layout}")
    for dim, entry in enumerate(entries):
        is_int = isinstance(entry, int) and not isinstance(entry, bool)
        if not isinstance(entry, slice) and not (is_int and layout.cuts[dim] is None):
            refuse(f"index {entry!r} of dim {dim} of {layout} is not supported: cut dims take slices, others ints too")


def _slice_cut_dims(x: ShardedTensor, entries: Sequence[Any]) -> ShardedTensor:
    """Returns `x` with the slices of cut dims applied."""
    layout = x.spec
    ranges = [
        range(*entry.indices(extent)) if isinstance(entry, slice) and cut is not None else range(extent)
        for entry, extent, cut in zip(entries, layout.shape, layout.cuts, strict=True)
    ]
    first = next((dim for dim, extent in enumerate(layout.shape) if ranges[dim] != range(extent)), None)
    return x if first is None else at_indices(x, ranges[first:])


@rule("narrow")
def narrow(x: ShardedTensor, dim: int, start: int, length: int) -> Tensor:
    dim = x.spec.dim(dim)
    start = int(start)
    start += x.spec.shape[dim] if start < 0 else 0
    if not 0 <= start <= start + length <= x.spec.shape[dim]:
        refuse(f"narrow of dim {dim} of {x.spec} from {start} by {length} exceeds its extent")
    return getitem(x, (*[slice(None)] * dim, slice(start, start + length)))


@rule("select")
def select(x: ShardedTensor, dim: int, index: int) -> Tensor:
    return getitem(x, (*[slice(None)] * x.spec.dim(dim), index))


@rule("unbind")
def unbind(x: ShardedTensor, dim: int = 0) -> tuple[Tensor, ...]:
    dim = x.spec.dim(dim)
    if x.spec.is_tile and x.spec.cuts[dim] is not None:
        refuse(f"unbind along dim {dim}, which is cut in {x.spec}, is not supported: cut dims take slices")
    return tuple(select(x, dim, index) for index in range(x.spec.shape[dim]))


@rule("chunk")
def chunk(x: ShardedTensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    return split(x, -(-x.spec.shape[x.spec.dim(dim)] // chunks), dim)


@rule("split", "split_with_sizes")
def split(
    x: ShardedTensor, split_size: int | Sequence[int] | None = None, dim: int = 0, split_size_or_sections: Any = None
) -> tuple[Tensor, ...]:
    dim = x.spec.dim(dim)
    extent = x.spec.shape[dim]
    sizes = split_size_or_sections if split_size is None else split_size
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - start) for start in range(0, extent, sizes)]
    if sum(sizes) != extent:
        refuse(f"split of dim {dim} of {x.spec} into {list(sizes)}: expected sizes that add up to {extent}")
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(narrow(x, dim, start, size) for start, size in zip(starts, sizes, strict=True))


@rule("index_select")
def index_select(x: ShardedTensor, dim: int, index: Tensor) -> Tensor:
    layout = x.spec
    dim = layout.dim(dim)
    if not layout.is_tile:
        return torch.index_select(whole(x), dim, index)
    if layout.cuts[dim] is not None or isinstance(index, ShardedTensor):
        refuse(f"index_select of dim {dim} of {layout} is not supported: cut dims take slices")
    shape = list(layout.shape)
    shape[dim] = index.numel()
    return wrap(local(x).index_select(dim, index), layout.with_dims(tuple(shape), layout.cuts))
