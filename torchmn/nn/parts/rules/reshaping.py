"""Other shapes for the same elements: flattening a tile keeps its columns where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.nn.parts.layout import AnyCut, FlatCut, Layout
from torchmn.nn.parts.moving import whole
from torchmn.nn.parts.part import Part, local, wrap
from torchmn.nn.parts.refusals import refuse
from torchmn.nn.parts.rules.registry import rule


@rule("flatten")
def flatten(x: Part, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    layout = x.layout_
    dims = len(layout.shape)
    start, end = start_dim % dims, end_dim % dims
    shape = (*layout.shape[:start], torch.Size(layout.shape[start : end + 1]).numel(), *layout.shape[end + 1 :])
    return _reshaped(x, shape)


@rule("view", "reshape")
def view(x: Part, *shape: Any) -> Tensor:
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        shape = tuple(shape[0])
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        refuse("view as another dtype is not supported for parts")
    known = torch.Size([extent for extent in shape if extent != -1]).numel()
    total = torch.Size(x.layout_.shape).numel()
    return _reshaped(x, tuple(total // known if extent == -1 and known else extent for extent in shape))


@rule("unflatten")
def unflatten(x: Part, dim: int, sizes: Sequence[int]) -> Tensor:
    layout = x.layout_
    dim %= len(layout.shape)
    return view(x, (*layout.shape[:dim], *sizes, *layout.shape[dim + 1 :]))


@rule("squeeze")
def squeeze(x: Part, dim: int | Sequence[int] | None = None) -> Tensor:
    layout = x.layout_
    dims = range(len(layout.shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % len(layout.shape) for d in dims if layout.shape[d] == 1}
    return _reshaped(x, tuple(extent for d, extent in enumerate(layout.shape) if d not in gone))


@rule("unsqueeze")
def unsqueeze(x: Part, dim: int) -> Tensor:
    layout = x.layout_
    dim %= len(layout.shape) + 1
    shape, cuts = list(layout.shape), list(layout.cuts)
    shape.insert(dim, 1)
    cuts.insert(dim, None)
    return wrap(local(x).unsqueeze(dim), layout.with_dims(tuple(shape), tuple(cuts)))


@rule("permute")
def permute(x: Part, *dims: Any) -> Tensor:
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    layout = x.layout_
    order = tuple(d % len(layout.shape) for d in order)
    if order[0] != 0:
        refuse(f"a permutation that moves the batch dim of {layout} is not supported")
    shape = tuple(layout.shape[d] for d in order)
    return wrap(local(x).permute(order), layout.with_dims(shape, tuple(layout.cuts[d] for d in order)))


@rule("transpose", "swapaxes", "swapdims")
def transpose(x: Part, dim0: int, dim1: int) -> Tensor:
    order = list(range(len(x.layout_.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(x, order)


@rule("expand", "expand_as", "repeat")
def expand(x: Part, *_: Any) -> Tensor:
    refuse("expand and repeat are not supported on cut tensors; torch broadcasts without them")


def _reshaped(x: Part, shape: tuple[int, ...]) -> Tensor:
    """`x` in another shape, if each new dim is a run of old dims (or an old dim in pieces, where it is not cut)."""
    layout = x.layout_
    if torch.Size(shape).numel() != torch.Size(layout.shape).numel():
        refuse(f"a tensor of {layout} can not become {shape}")
    if shape == layout.shape:
        return wrap(local(x) * 1 if x.requires_grad and x.is_leaf else local(x), layout)
    cuts = _new_cuts(layout, shape)
    if cuts is None:
        if not layout.is_tile:
            return whole(x).reshape(shape)
        refuse(f"a cut tensor of {layout} can not become {shape}: only whole dims may be joined, behind the batch dim")
    new = layout.with_dims(shape, cuts)
    return wrap(local(x).reshape(new.local_shape()), new)


def _new_cuts(layout: Layout, shape: tuple[int, ...]) -> tuple[AnyCut, ...] | None:
    """The cuts of the new shape; None if there are none that leave every element on its rank."""
    old = list(enumerate(layout.shape))
    cuts: list[AnyCut] = []
    new = list(shape)
    while new or old:
        if new and old and new[0] == old[0][1]:
            cuts.append(layout.cuts[old.pop(0)[0]])
            new.pop(0)
            continue
        left, right, taken, made = 1, 1, [], []
        while not made or left != right:
            if (left <= right and old) or not new:
                if not old:
                    return None
                dim, extent = old.pop(0)
                left *= extent
                taken.append(dim)
            else:
                right *= new[0]
                made.append(new.pop(0))
        if not any(layout.cuts[dim] for dim in taken):
            cuts += [None] * len(made)
        elif len(made) == 1 and taken == list(range(1, len(layout.shape))) and len(taken) > 1:
            if any(isinstance(layout.cuts[dim], FlatCut) for dim in taken):
                return None
            cuts.append(FlatCut(tuple(layout.shape[1:]), tuple(layout.cuts[1:])))  # type: ignore[arg-type]
        elif all(extent == 1 for extent in made):
            return None
        else:
            flat = [dim for dim in taken if isinstance(layout.cuts[dim], FlatCut)]
            cut = layout.cuts[flat[0]] if flat else None
            if flat and len(taken) == 1 and isinstance(cut, FlatCut) and tuple(made) == cut.shape:
                cuts += list(cut.cuts)
            else:
                return None
    return tuple(cuts)
