"""Reductions: over dims that are whole on each rank nothing travels; over the cut ones, ranks add up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.functions.replicated import sum_of_parts
from torchmn.nn.parts.layout import Layout
from torchmn.nn.parts.moving import whole
from torchmn.nn.parts.part import RULES, Part, local, wrap
from torchmn.nn.parts.refusals import refuse
from torchmn.nn.parts.rules.registry import composed, functions_named, rule

Dims = int | Sequence[int] | None


def reduced_dims(layout: Layout, dim: Dims) -> tuple[int, ...]:
    """The dims of a reduction, counted from the first."""
    dims = range(len(layout.shape)) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return tuple(sorted(d % len(layout.shape) for d in dims))


def _crosses(layout: Layout, dims: tuple[int, ...], function: str) -> bool:
    """Whether ranks must add up; all cut dims must then be in it."""
    crossing = [dim for dim in layout.cut_dims if dim in dims]
    if crossing and len(crossing) < len(layout.cut_dims):
        refuse(f"{function} over dims {dims} of {layout}, of which only some are cut, is not supported")
    return bool(crossing)


def _rest(layout: Layout, dims: tuple[int, ...], keepdim: bool) -> Layout:
    """The layout of a result that stays cut."""
    kept = [d for d in range(len(layout.shape)) if keepdim or d not in dims]
    shape = tuple(1 if d in dims else layout.shape[d] for d in kept)
    return layout.with_dims(shape, tuple(None if d in dims else layout.cuts[d] for d in kept))


@rule("sum")
def total(x: Part, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    layout = x.layout_
    dims = reduced_dims(layout, dim)
    mine = local(x).sum(dims, keepdim=keepdim, dtype=dtype)
    if _crosses(layout, dims, "sum"):
        return sum_of_parts(mine, layout.grid.tiles)
    return wrap(mine, _rest(layout, dims, keepdim))


@rule("mean")
def mean(x: Part, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    layout = x.layout_
    dims = reduced_dims(layout, dim)
    if not _crosses(layout, dims, "mean"):
        return wrap(local(x).mean(dims, keepdim=keepdim, dtype=dtype), _rest(layout, dims, keepdim))
    mine = local(x).sum(dims, keepdim=keepdim, dtype=dtype)
    return sum_of_parts(mine, layout.grid.tiles) / torch.Size([layout.shape[d] for d in dims]).numel()


def _extreme(function: str, x: Part, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """amax and amin: the gradient is shared equally by all elements that are the extreme one, as torch does."""
    layout = x.layout_
    dims = reduced_dims(layout, dim)
    mine, comm = local(x), layout.grid.tiles
    torch_function = getattr(torch, function)
    if not _crosses(layout, dims, function):
        return wrap(torch_function(mine, dims, keepdim=keepdim), _rest(layout, dims, keepdim))
    if mine.is_meta:
        return mine.sum(dims, keepdim=keepdim)
    sign = 1 if function == "amax" else -1
    with torch.no_grad():
        shape = tuple(1 if d in dims else extent for d, extent in enumerate(mine.shape))
        best = torch_function(mine, dims, keepdim=True) if mine.numel() else mine.new_full(shape, -sign * torch.inf)
        best = comm.allreduce(best, "max" if sign > 0 else "min")
        chosen = mine == best
        count = comm.allreduce(chosen.sum(dims, keepdim=True).to(mine.dtype))
    share = torch.where(chosen, mine, mine.new_zeros(())) / count
    return sum_of_parts(share.sum(dims, keepdim=keepdim), comm)


for _name in ("amax", "amin"):
    for _function in functions_named(_name):
        RULES[_function] = partial(_extreme, _name)


@rule("max")
def maximum(x: Part, *args: Any, **kwargs: Any) -> Any:
    return _extreme_of_all("amax", torch.max, x, args, kwargs)


@rule("min")
def minimum(x: Part, *args: Any, **kwargs: Any) -> Any:
    return _extreme_of_all("amin", torch.min, x, args, kwargs)


def _extreme_of_all(name: str, function: Any, x: Part, args: tuple, kwargs: dict) -> Any:
    if not args and not kwargs:
        return _extreme(name, x)
    if x.layout_.is_tile:
        refuse(f"{function.__name__} along a dim also returns indices, which count within one tile: use {name}")
    return function(whole(x), *args, **kwargs)


@composed("var")
def variance(x: Part, dim: Dims = None, *, unbiased: bool = True, correction: int = 1, keepdim: bool = False) -> Tensor:
    count = torch.Size([x.layout_.shape[d] for d in reduced_dims(x.layout_, dim)]).numel()
    dims = reduced_dims(x.layout_, dim)
    distance = x - x.mean(dims, keepdim=True)
    squares = distance.square().sum(dims, keepdim=keepdim)
    return squares / max(count - (correction if unbiased else 0), 0)


@composed("std")
def deviation(x: Part, *args: Any, **kwargs: Any) -> Tensor:
    return variance(x, *args, **kwargs).sqrt()


def _along(function: Any, x: Part, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Functions along one dim that is whole on every rank: each rank computes its own rows."""
    layout = x.layout_
    if dim is None:
        refuse(f"{function.__name__} without dim is not supported on cut tensors")
    if layout.cuts[dim] is not None:
        if not layout.is_tile:
            return function(whole(x), dim, *args, **kwargs)
        refuse(f"{function.__name__} along dim {dim}, which is cut in {layout}, is not supported")
    result = function(local(x), dim, *args, **kwargs)
    if tuple(result.shape) != layout.local_shape():
        keepdim = result.dim() == len(layout.shape)
        return wrap(result, _rest(layout, (dim % len(layout.shape),), keepdim))
    return wrap(result, layout)


for _name in ("softmax", "log_softmax", "softmin", "argmax", "argmin", "cumsum", "logsumexp"):
    for _function in functions_named(_name):
        RULES[_function] = partial(_along, _function)


@rule("glu")
def glu(x: Part, dim: int = -1) -> Tensor:
    layout = x.layout_
    dim %= len(layout.shape)
    if layout.cuts[dim] is not None:
        return F.glu(whole(x), dim) if not layout.is_tile else refuse(f"glu along a cut dim of {layout}")
    shape = list(layout.shape)
    shape[dim] //= 2
    return wrap(F.glu(local(x), dim), layout.with_dims(tuple(shape), layout.cuts))
