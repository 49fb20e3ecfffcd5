"""Rules for normalisation layers, with the statistics over all ranks that one rank would compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.repeated_operations import is_repeated
from torchmn.functions.moments import Moments, local_moments, normalize_over_ranks, track_statistics, union
from torchmn.sharded.memory_format import with_memory_format_of
from torchmn.sharded.redistribute import gathered, replicated_operand, shard_like, whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import composed, rule
from torchmn.sharded.tensor import ShardedTensor, local, wrap


@rule(F.batch_norm)
def batch_norm(
    x: ShardedTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    layout, settings = x.spec, (running_mean, running_var)
    if layout.is_tile and layout.cuts[1] is not None:
        refuse("batch_norm of a flattened image that is cut is not supported: normalise before flattening")
    if not layout.is_tile:
        weight, bias = gathered(weight), gathered(bias)
        return batch_norm_over_ranks(whole(x), *settings, weight, bias, training, momentum, eps, layout.grid.replicas)
    weight = None if weight is None else replicated_operand(weight, layout)
    bias = None if bias is None else replicated_operand(bias, layout)
    normal = batch_norm_over_ranks(local(x), *settings, weight, bias, training, momentum, eps, layout.grid.comm)
    return wrap(normal, layout)


def batch_norm_over_ranks(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    comm: Communicator,
) -> Tensor:
    """Returns `F.batch_norm` of a plain tensor, with the statistics of the tensors of all ranks of `comm`."""
    if x.is_meta and training:
        if not x.numel():
            return x * 1
        # F.batch_norm raises an error for one value per channel; together with other ranks there may be more.
        return F.batch_norm(torch.cat([x, x]), None, None, weight, bias, True, 0.0, eps)[: len(x)]
    if not training or comm.size == 1:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum or 0.0, eps)
    moments = _moments_of_all_ranks(x, comm)
    if moments.count == 1:
        refuse(f"expected more than 1 value per channel when training, got 1 over all ranks, here {tuple(x.shape)}")
    if running_mean is not None and running_var is not None:
        track_statistics(running_mean, running_var, moments, momentum or 0.0)
    return normalize_over_ranks(x, weight, bias, moments, eps, comm)


@torch.no_grad()
def _moments_of_all_ranks(x: Tensor, comm: Communicator) -> Moments:
    packed = local_moments(x if x.dtype == torch.float64 else x.float()).packed()
    channels = x.shape[1]
    with comm.agreed("batch_norm", compared=is_repeated(comm, ("batch_norm", channels)), channels=channels):
        parts = comm.allgather(packed)
    return union([Moments.unpacked(part.to(x.device)) for part in parts])


def _wide(x: Tensor) -> Tensor:
    """Returns float32 for half precision, as torch computes statistics of these."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _standardized(x: ShardedTensor, dims: list[int], eps: float) -> Tensor:
    """Returns (x - mean) / sqrt(variance + eps) over `dims`; in two passes, which avoids cancellation."""
    wide = _wide(x)
    distance = wide - wide.mean(dims, keepdim=True)
    return distance * torch.rsqrt(distance.square().mean(dims, keepdim=True) + eps)


@composed("group_norm")
def group_norm(
    x: ShardedTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    layout = x.spec
    if layout.cuts[1] is not None:
        return F.group_norm(whole(x), num_groups, gathered(weight), gathered(bias), eps)
    channels = layout.shape[1]
    if channels % num_groups:
        refuse(f"group_norm expects channels divisible by num_groups, got {channels} and {num_groups}")
    grouped = wrap(
        local(x).unflatten(1, (num_groups, channels // num_groups)),
        layout.with_dims(
            (layout.shape[0], num_groups, channels // num_groups, *layout.shape[2:]),
            (layout.cuts[0], None, None, *layout.cuts[2:]),
        ),
    )
    normal: Any = _standardized(grouped, list(range(2, len(layout.shape) + 1)), eps)
    normal = with_memory_format_of(local(normal).flatten(1, 2), local(x))
    return _scaled_channels(wrap(normal, layout), weight, bias).to(x.dtype)


def _scaled_channels(x: ShardedTensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns `x` times one weight plus one bias per channel."""
    layout, result = x.spec, local(x)
    shape = (-1, *[1] * (len(layout.shape) - 2))
    if weight is not None:
        result = result * replicated_operand(weight, layout).view(shape)
    if bias is not None:
        result = result + replicated_operand(bias, layout).view(shape)
    return wrap(result, layout)


@composed(F.instance_norm)
def instance_norm(
    x: ShardedTensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    layout = x.spec
    if not use_input_stats:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = range(2, len(layout.shape))
    if not layout.is_tile and (weight is not None or running_mean is not None):  # channels are cut, these are not
        full = whole(x)
        if running_mean is not None and running_var is not None:
            variance, mean = torch.var_mean(_wide(full), list(dims), correction=0, keepdim=True)
            _track_instances(x, mean, variance, running_mean, running_var, momentum)
        return F.instance_norm(full, None, None, gathered(weight), gathered(bias), True, momentum, eps)
    wide = _wide(x)
    mean = wide.mean(list(dims), keepdim=True)
    distance = wide - mean
    variance = distance.square().mean(list(dims), keepdim=True)
    if running_mean is not None and running_var is not None:
        _track_instances(x, mean, variance, running_mean, running_var, momentum)
    # Contiguous as torch's result: a later dropout draws in the order of memory.
    normal = wrap(local(distance * torch.rsqrt(variance + eps)).contiguous(), layout)
    return _scaled_channels(normal, weight, bias).to(x.dtype)


@torch.no_grad()
def _track_instances(
    x: ShardedTensor, mean: Tensor, variance: Tensor, running_mean: Any, running_var: Any, momentum: float
) -> None:
    """Updates the running statistics as torch's instance norm does: with the mean over samples of each sample's."""
    layout = x.spec
    replicas, count = layout.grid.replicas, torch.Size(layout.shape[2:]).numel()
    sums = torch.stack([mean.flatten(1).sum(0), variance.flatten(1).sum(0) * (count / max(count - 1, 1))])
    if sums.is_meta:
        return
    total = (replicas.allreduce(sums) if replicas.size > 1 else sums) / layout.samples.total
    running_mean.mul_(1 - momentum).add_(total[0].to(running_mean), alpha=momentum)
    running_var.mul_(1 - momentum).add_(total[1].to(running_var), alpha=momentum)


@composed("layer_norm")
def layer_norm(
    x: ShardedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    layout = x.spec
    first = len(layout.shape) - len(normalized_shape)
    if tuple(normalized_shape) != layout.shape[first:]:
        refuse(f"layer_norm expects the last dims to be {tuple(normalized_shape)}, got {layout}")
    last_dims = {dim: dim + first for dim in range(len(normalized_shape))}
    if not any(layout.cuts[first:]):
        weight = None if weight is None else replicated_operand(weight, layout)
        bias = None if bias is None else replicated_operand(bias, layout)
        return wrap(F.layer_norm(local(x), tuple(normalized_shape), weight, bias, eps), layout)
    result = local(_standardized(x, list(range(first, len(layout.shape))), eps)).contiguous()
    if weight is not None:
        result = result * shard_like(replicated_operand(weight, layout), layout, last_dims)
    if bias is not None:
        result = result + shard_like(replicated_operand(bias, layout), layout, last_dims)
    return wrap(result.to(x.dtype), layout)


@composed("local_response_norm")
def local_response_norm(x: ShardedTensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """Normalises over neighbouring channels, all of which are on this rank."""
    layout = x.spec
    if layout.cuts[1] is not None:
        return F.local_response_norm(whole(x), size, alpha, beta, k)
    tile = local(x)
    # torch's function raises an error for an empty tensor.
    return wrap(F.local_response_norm(tile, size, alpha, beta, k) if tile.numel() else tile * 1, layout)


@composed("normalize")
def normalize(x: ShardedTensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    """Returns `x` divided by its norm along a dim."""
    layout = x.spec
    dims = [dim] if isinstance(dim, int) else dim
    if not any(layout.cuts[d] for d in dims):
        return wrap(F.normalize(local(x), p, dim, eps), layout)
    return x / x.norm(p, dim, True).clamp_min(eps)
