"""Rules for cat and stack, such as the skip connections of a U-Net."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmn.sharded.combined_dims import check_samples
from torchmn.sharded.redistribute import gathered, replicated_operand, shard_like
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import rule
from torchmn.sharded.tensor import ShardedTensor, local, wrap


@rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    sharded = [x for x in tensors if isinstance(x, ShardedTensor)]
    layout = sharded[0].spec
    dim = layout.dim(dim)
    check_samples(layout, (dim,), "cat")
    if not any(x.spec.is_tile for x in sharded):
        return torch.cat([gathered(x) for x in tensors], dim)
    if layout.cuts[dim] is not None:
        refuse(f"cat along dim {dim}, which is cut over ranks in {layout}, is not supported")
    shapes = [x.spec.shape if isinstance(x, ShardedTensor) else tuple(x.shape) for x in tensors]
    for x in sharded:
        if x.spec.cuts != layout.cuts:
            refuse(f"cat of {layout} and {x.spec}, which are cut in different ways")
    for shape in shapes:
        if len(shape) != len(layout.shape) or any(
            a != b for at, (a, b) in enumerate(zip(shape, layout.shape, strict=True)) if at != dim
        ):
            refuse(f"cat along dim {dim} expects shapes that are equal in all other dims, got {shapes}")
    shape = list(layout.shape)
    shape[dim] = sum(s[dim] for s in shapes)
    result = layout.with_dims(tuple(shape), layout.cuts)
    pieces = [
        local(x)
        if isinstance(x, ShardedTensor)
        else shard_like(replicated_operand(x, layout), layout, {d: d for d in range(x.dim()) if d != dim})
        for x in tensors
    ]
    return wrap(torch.cat(pieces, dim), result)


@rule("stack")
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    sharded = [x for x in tensors if isinstance(x, ShardedTensor)]
    layout = sharded[0].spec
    if not any(x.spec.is_tile for x in sharded):
        return torch.stack([gathered(x) for x in tensors], dim)
    if any(not isinstance(x, ShardedTensor) or x.spec != layout for x in tensors):
        refuse("stack of tensors that are not cut in the same way is not supported")
    dim = layout.dim(dim, new=True)
    if dim == 0:
        refuse("stack along a new batch dim is not supported")
    shape, cuts = list(layout.shape), list(layout.cuts)
    shape.insert(dim, len(tensors))
    cuts.insert(dim, None)
    return wrap(torch.stack([local(x) for x in tensors], dim), layout.with_dims(tuple(shape), tuple(cuts)))
