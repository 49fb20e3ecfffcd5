"""Rules for reductions. Over cut dims they need a sum (or maximum) over ranks; over other dims no communication."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.sharded.redistribute import whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import composed, functions_named, names, rule
from torchmn.sharded.replicated import sum_over_shards
from torchmn.sharded.rules.pointwise import pointwise
from torchmn.sharded.sharding import Sharding
from torchmn.sharded.tensor import RULES, ShardedTensor, local, wrap

Dims = int | Sequence[int] | None


def reduced_dims(layout: Sharding, dim: Dims) -> tuple[int, ...]:
    """Returns the dims of a reduction, sorted and counted from the first."""
    dims = range(len(layout.shape)) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    if any(not isinstance(d, int) or isinstance(d, bool) for d in dims):
        refuse(f"expected dims of {layout}, got {dim!r}")
    return tuple(sorted(layout.dim(d) for d in dims))


def needs_reduction(layout: Sharding, dims: tuple[int, ...], function: str) -> bool:
    """Whether a reduction over `dims` needs a reduction over ranks.

    Raises:
        ParallelizeError: if only some of the cut dims are among `dims`.
    """
    crossing = [dim for dim in layout.cut_dims if dim in dims]
    if crossing and len(crossing) < len(layout.cut_dims):
        refuse(f"{function} over dims {dims} of {layout}, of which only some are cut, is not supported")
    return bool(crossing)


def _reduced(layout: Sharding, dims: tuple[int, ...], keepdim: bool) -> Sharding:
    """Returns the sharding of the result of a reduction over dims that are not cut."""
    kept = [d for d in range(len(layout.shape)) if keepdim or d not in dims]
    shape = tuple(1 if d in dims else layout.shape[d] for d in kept)
    return layout.with_dims(shape, tuple(None if d in dims else layout.cuts[d] for d in kept))


@rule("sum")
def total(x: ShardedTensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    layout = x.spec
    dims = reduced_dims(layout, dim)
    here = local(x).sum(dims, keepdim=keepdim, dtype=dtype)
    if needs_reduction(layout, dims, "sum"):
        return sum_over_shards(here, layout.grid.tiles)
    return wrap(here, _reduced(layout, dims, keepdim))


@rule("mean")
def mean(x: ShardedTensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    layout = x.spec
    dims = reduced_dims(layout, dim)
    if not needs_reduction(layout, dims, "mean"):
        return wrap(local(x).mean(dims, keepdim=keepdim, dtype=dtype), _reduced(layout, dims, keepdim))
    here = local(x).sum(dims, keepdim=keepdim, dtype=dtype)
    return sum_over_shards(here, layout.grid.tiles) / torch.Size([layout.shape[d] for d in dims]).numel()


def _extreme(function: str, x: ShardedTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns amax or amin. The gradient is divided equally between all elements with that value, as in torch."""
    layout = x.spec
    dims = reduced_dims(layout, dim)
    shard, comm = local(x), layout.grid.tiles
    torch_function = getattr(torch, function)
    if not needs_reduction(layout, dims, function):
        return wrap(torch_function(shard, dims, keepdim=keepdim), _reduced(layout, dims, keepdim))
    if shard.is_meta:
        return shard.sum(dims, keepdim=keepdim)
    sign = 1 if function == "amax" else -1
    with torch.no_grad():
        shape = tuple(1 if d in dims else extent for d, extent in enumerate(shard.shape))
        best = (
            torch_function(shard, dims, keepdim=True) if shard.numel() else shard.new_full(shape, _limit(shard, sign))
        )
        best = comm.allreduce(best, "max" if sign > 0 else "min")
        chosen = shard == best
        count = comm.allreduce(chosen.sum(dims, keepdim=True).to(shard.dtype))
    if not shard.is_floating_point():  # no gradient, and no division
        return best if keepdim else best.squeeze(dims)
    share = torch.where(chosen, shard, shard.new_zeros(())) / count
    result = sum_over_shards(share.sum(dims, keepdim=keepdim), comm)
    # The sum of the shares has the right gradient but is rounded, and models compare elements with the maximum.
    result.detach().copy_(best if keepdim else best.squeeze(dims))
    return result


def _limit(x: Tensor, sign: int) -> float:
    """Returns the smallest (sign 1) or largest (sign -1) value of the dtype of `x`."""
    if x.is_floating_point():
        return -sign * torch.inf
    if x.dtype == torch.bool:
        return sign < 0
    return torch.iinfo(x.dtype).min if sign > 0 else torch.iinfo(x.dtype).max


for _name in ("amax", "amin"):
    for _function in functions_named(_name):
        RULES[_function] = partial(_extreme, _name)


@rule("max")
def maximum(x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    return _extreme_of_all("amax", torch.max, torch.maximum, x, args, kwargs)


@rule("min")
def minimum(x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    return _extreme_of_all("amin", torch.min, torch.minimum, x, args, kwargs)


def _extreme_of_all(name: str, function: Any, of_two: Any, x: ShardedTensor, args: tuple, kwargs: dict) -> Any:
    """Returns torch.max or torch.min: of all elements, of two tensors, or along a dim with the indices."""
    if not args and not kwargs:
        return _extreme(name, x)
    if isinstance(kwargs.get("other", args[0] if args else None), Tensor):
        return pointwise(of_two, False, x, *args, **kwargs)
    return along_dim(function, x, *args, **kwargs)


@composed("all")
def all_true(x: ShardedTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _extreme("amin", wrap(local(x).bool().float(), x.spec), dim, keepdim).bool()


@composed("any")
def any_true(x: ShardedTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _extreme("amax", wrap(local(x).bool().float(), x.spec), dim, keepdim).bool()


@composed("var")
def variance(
    x: ShardedTensor,
    dim: Dims | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    if isinstance(dim, bool):  # torch.var(x, unbiased)
        dim, unbiased = None, dim
    dims = reduced_dims(x.spec, dim)
    count = torch.Size([x.spec.shape[d] for d in dims]).numel()
    fewer = (1 if unbiased else 0) if correction is None else correction
    squares = (x - x.mean(dims, keepdim=True)).square().sum(dims, keepdim=keepdim)
    return squares / max(count - fewer, 0)


@composed("std")
def deviation(x: ShardedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Returns the standard deviation. Its gradient is zero where all elements are equal, as in torch."""
    squared = variance(x, *args, **kwargs)
    is_zero = squared == 0
    return squared.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


@composed("var_mean")
def variance_and_mean(
    x: ShardedTensor, dim: Dims | bool = None, unbiased: bool = True, keepdim: bool = False, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    mean_dim = None if isinstance(dim, bool) else dim
    return variance(x, dim, unbiased, keepdim, **kwargs), x.mean(reduced_dims(x.spec, mean_dim), keepdim=keepdim)


@composed(torch.norm, Tensor.norm, torch.linalg.vector_norm)
def norm(x: ShardedTensor, p: Any = 2, dim: Dims = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    """Returns the p-norm over dims. Its gradient at zero is zero, as in torch."""
    p = kwargs.pop("ord", 2.0 if p in (None, "fro") else p)
    if kwargs.get("out") is not None or kwargs.get("dtype") is not None or not isinstance(p, int | float) or p <= 0:
        refuse(f"a norm with p={p!r}, {kwargs} is not supported on cut tensors")
    dims = reduced_dims(x.spec, dim)
    if p == float("inf"):
        return x.abs().amax(dims, keepdim=keepdim)
    total = x.abs().pow(p).sum(dims, keepdim=keepdim)
    is_zero = total == 0
    return total.masked_fill(is_zero, 1.0).pow(1.0 / p).masked_fill(is_zero, 0.0)


def along_dim(function: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Returns a function along one dim that is not cut: each rank computes its shard. Cut vectors are gathered."""
    layout, given = x.spec, kwargs.get("dim", args[0] if args else None)
    dim = layout.dim(given) if isinstance(given, int) and not isinstance(given, bool) else None
    if not layout.is_tile and (dim is None or layout.cuts[dim] is not None):
        return function(whole(x), *args, **kwargs)
    if dim is None:
        refuse(f"{function.__name__} without one dim is not supported on cut tensors, got dim={given!r} for {layout}")
    if layout.cuts[dim] is not None:
        refuse(f"{function.__name__} along dim {given}, which is cut in {layout}, is not supported")
    result = function(local(x), *args, **kwargs)
    if isinstance(result, Tensor):
        return _along_layout(result, layout, dim)
    return type(result)([_along_layout(tensor, layout, dim) for tensor in result])


def _along_layout(result: Tensor, layout: Sharding, dim: int) -> ShardedTensor:
    if result.dim() < len(layout.shape):
        return wrap(result, _reduced(layout, (dim,), False))
    shape = list(layout.shape)
    shape[dim] = result.shape[dim]
    return wrap(result, layout.with_dims(tuple(shape), layout.cuts))


def _along_last(function: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Returns a function whose dim is the last one by default."""
    if not (args and isinstance(args[0], int) and not isinstance(args[0], bool)):
        kwargs.setdefault("dim", -1)
    return along_dim(function, x, *args, **kwargs)


for _name in names("softmin argmax argmin cumsum cumprod logcumsumexp logsumexp cummax cummin prod median"):
    for _function in functions_named(_name):
        RULES[_function] = partial(along_dim, _function)
for _name in ("sort", "argsort"):
    for _function in functions_named(_name):
        RULES[_function] = partial(_along_last, _function)


@rule("topk")
def topk(x: ShardedTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
    def topk_along(x: Tensor, dim: int) -> Any:
        return torch.topk(x, k, dim, largest, sorted)

    topk_along.__name__ = "topk"  # for error messages
    return along_dim(topk_along, x, dim)


@rule("glu")
def glu(x: ShardedTensor, dim: int = -1) -> Tensor:
    layout = x.spec
    dim = layout.dim(dim)
    if layout.cuts[dim] is not None:
        return F.glu(whole(x), dim) if not layout.is_tile else refuse(f"glu along a cut dim of {layout}")
    shape = list(layout.shape)
    shape[dim] //= 2
    return wrap(F.glu(local(x), dim), layout.with_dims(tuple(shape), layout.cuts))
