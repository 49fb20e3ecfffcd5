"""Rules for reshaping, permuting and expanding. No element changes its rank: a flattened image has a `FlatCut`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.sharded.combined_dims import check_samples
from torchmn.sharded.memory_format import with_memory_format_of
from torchmn.sharded.redistribute import whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import rule
from torchmn.sharded.sharding import AnyCut, FlatCut, Sharding
from torchmn.sharded.tensor import ShardedTensor, local, wrap


@rule("flatten")
def flatten(x: ShardedTensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    layout = x.spec
    start, end = layout.dim(start_dim), layout.dim(end_dim)
    shape = (*layout.shape[:start], torch.Size(layout.shape[start : end + 1]).numel(), *layout.shape[end + 1 :])
    return _reshaped(x, shape)


@rule("view", "reshape")
def view(x: ShardedTensor, *shape: Any) -> Tensor:
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        shape = tuple(shape[0])
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        refuse("view as another dtype is not supported for sharded tensors")
    known = torch.Size([extent for extent in shape if extent != -1]).numel()
    total = torch.Size(x.spec.shape).numel()
    return _reshaped(x, tuple(total // known if extent == -1 and known else extent for extent in shape))


@rule("view_as")
def view_as(x: Tensor, other: Tensor) -> Tensor:
    """Returns a view; autograd functions that only change the gradient use it with x itself."""
    if isinstance(x, ShardedTensor) and isinstance(other, ShardedTensor) and x.spec == other.spec:
        return wrap(local(x).view_as(local(x)), x.spec)
    shape = other.spec.shape if isinstance(other, ShardedTensor) else tuple(other.shape)
    return view(x, shape) if isinstance(x, ShardedTensor) else x.view(shape)


@rule("unflatten")
def unflatten(x: ShardedTensor, dim: int, sizes: Sequence[int]) -> Tensor:
    layout = x.spec
    dim = layout.dim(dim)
    return view(x, (*layout.shape[:dim], *sizes, *layout.shape[dim + 1 :]))


@rule("squeeze")
def squeeze(x: ShardedTensor, dim: int | Sequence[int] | None = None) -> Tensor:
    layout = x.spec
    dims = range(len(layout.shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {layout.dim(d) for d in dims if layout.shape[layout.dim(d)] == 1}
    check_samples(layout, tuple(gone), "squeeze")
    if any(layout.cuts[d] is not None for d in gone):  # one rank holds all of a cut dim of extent 1
        return whole(x).squeeze(tuple(gone))
    kept = [d for d in range(len(layout.shape)) if d not in gone]
    left = layout.with_dims(tuple(layout.shape[d] for d in kept), tuple(layout.cuts[d] for d in kept))
    return wrap(local(x).reshape(left.local_shape()), left)


@rule("unsqueeze")
def unsqueeze(x: ShardedTensor, dim: int) -> Tensor:
    layout = x.spec
    dim = layout.dim(dim, new=True)
    if dim == 0:
        check_samples(layout, (0,), "unsqueeze")
    shape, cuts = list(layout.shape), list(layout.cuts)
    shape.insert(dim, 1)
    cuts.insert(dim, None)
    return wrap(local(x).unsqueeze(dim), layout.with_dims(tuple(shape), tuple(cuts)))


@rule("permute")
def permute(x: ShardedTensor, *dims: Any) -> Tensor:
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    layout = x.spec
    order = tuple(layout.dim(d) for d in order)
    if order[0] != 0:
        if not layout.is_tile:  # attention and recurrent layers take vectors with time before the batch
            return whole(x).permute(order)
        refuse(f"a permutation that moves the batch dim of {layout} is not supported. Keep the batch first")
    shape = tuple(layout.shape[d] for d in order)
    return wrap(local(x).permute(order), layout.with_dims(shape, tuple(layout.cuts[d] for d in order)))


@rule("transpose", "swapaxes", "swapdims")
def transpose(x: ShardedTensor, dim0: int, dim1: int) -> Tensor:
    order = list(range(len(x.spec.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(x, order)


@rule("movedim", "moveaxis")
def movedim(x: ShardedTensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    moved: Any = [source] if isinstance(source, int) else source
    target: Any = [destination] if isinstance(destination, int) else destination
    # Extents that are the numbers of the dims: after torch's movedim they are the permutation.
    numbered = torch.empty(tuple(range(len(x.spec.shape))), device="meta")
    return permute(x, numbered.movedim(moved, target).shape)


@rule("expand")
def expand(x: ShardedTensor, *sizes: Any) -> Tensor:
    shape = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    layout = x.spec
    new_dims = len(shape) - len(layout.shape)
    if new_dims:
        check_samples(layout, (0,), "expand to more dims")
    new = tuple(layout.shape[at - new_dims] if extent == -1 else extent for at, extent in enumerate(shape))
    if any(new[dim + new_dims] != layout.shape[dim] for dim in layout.cut_dims):
        refuse(f"expand of cut dims of {layout} to {shape} is not supported")
    wide = layout.with_dims(new, (*[None] * new_dims, *layout.cuts))
    return wrap(local(x).expand(wide.local_shape()), wide)


@rule("expand_as")
def expand_as(x: Tensor, other: Tensor) -> Tensor:
    """Returns `x` expanded; a whole tensor stays whole, which takes no memory."""
    shape = other.spec.shape if isinstance(other, ShardedTensor) else tuple(other.shape)
    return expand(x, shape) if isinstance(x, ShardedTensor) else x.expand(shape)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(x: ShardedTensor, groups: int) -> Tensor:
    layout = x.spec
    if layout.cuts[1] is not None:
        refuse(f"channel_shuffle expects channels in dim 1, which is cut in {layout}")
    channels = torch.arange(layout.shape[1]).view(groups, -1).T.reshape(-1)
    return wrap(with_memory_format_of(local(x).index_select(1, channels.to(x.device)), local(x)), layout)


def _reshaped(x: ShardedTensor, shape: tuple[int, ...]) -> Tensor:
    """Returns `x` in another shape, if each new dim joins old dims, or divides an old dim that is not cut."""
    layout = x.spec
    if torch.Size(shape).numel() != torch.Size(layout.shape).numel():
        refuse(f"a tensor of {layout} cannot become {shape}")
    if shape == layout.shape:
        return wrap(local(x).view_as(local(x)), layout)
    batch = layout.shape[0]
    if batch and (not shape or shape[0] == 0 or (shape[0] % batch and batch % shape[0])):  # dims may be joined to it
        check_samples(layout, (0,), f"a view as {shape}")
    cuts = _new_cuts(layout, shape)
    if cuts is None:
        if not layout.is_tile or all(layout.shape[dim] == 1 for dim in layout.cut_dims):
            return whole(x).reshape(shape)  # a vector, or an image of one pixel
        refuse(f"a cut tensor of {layout} cannot become {shape}: only whole dims may be joined, after the batch dim")
    new = layout.with_dims(shape, cuts)
    return wrap(local(x).reshape(new.local_shape()), new)


def _new_cuts(layout: Sharding, shape: tuple[int, ...]) -> tuple[AnyCut, ...] | None:
    """Returns the cuts of the new shape; None if elements would have to change their rank."""
    old, new = list(range(len(layout.shape))), list(shape)
    cuts: list[AnyCut] = []
    while old or new:
        if old and new and layout.shape[old[0]] == new[0]:
            cuts.append(layout.cuts[old.pop(0)])
            new.pop(0)
        elif new and new[0] == 1:
            cuts.append(None)
            new.pop(0)
        elif old and layout.shape[old[0]] == 1 and layout.cuts[old[0]] is None:
            old.pop(0)
        else:
            run, made = _run(layout, old, new)
            joined = _joined(layout, run, made)
            if joined is None:
                return None
            cuts += joined
    return tuple(cuts) if sum(isinstance(cut, FlatCut) for cut in cuts) < 2 else None


def _run(layout: Sharding, old: list[int], new: list[int]) -> tuple[list[int], list[int]]:
    """Removes from both lists, and returns, the shortest runs of old and new dims with equally many elements."""
    run, made, left, right = [], [], 1, 1
    while not run or not made or left != right:
        if old and (left <= right or not new):
            run.append(old.pop(0))
            left *= layout.shape[run[-1]]
        elif new:
            made.append(new.pop(0))
            right *= made[-1]
        else:
            break
    while old and not new:  # dims of extent 1 at the end
        run.append(old.pop(0))
    return run, made


def _joined(layout: Sharding, run: list[int], made: list[int]) -> list[AnyCut] | None:
    """Returns the cuts of the new dims `made` from a run of old ones; None if elements would have to change ranks."""
    cuts = [layout.cuts[dim] for dim in run]
    if not any(cuts):
        return [None for _ in made]
    image_cuts = tuple(cut for cut in cuts if not isinstance(cut, FlatCut))
    if len(image_cuts) < len(cuts):
        flat = cuts[0]
        return list(flat.cuts) if len(run) == 1 and isinstance(flat, FlatCut) and tuple(made) == flat.shape else None
    if len(made) != 1 or run[0] == 0:
        return None
    return [FlatCut(tuple(layout.shape[dim] for dim in run), image_cuts)]
