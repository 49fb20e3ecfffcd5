"""Rules for softmax, also along cut dims, as in spatial attention and soft-argmax."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchmn.sharded.registry import functions_named
from torchmn.sharded.replicated import enter_shards, sum_over_shards
from torchmn.sharded.rules.reductions import along_dim, needs_reduction
from torchmn.sharded.tensor import RULES, ShardedTensor, local, wrap


def _softmax(function: Any, x: ShardedTensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Returns softmax or log_softmax; along a cut dim with the maximum and the sum over ranks."""
    layout = x.spec
    if not isinstance(dim, int) or not layout.is_tile or layout.cuts[layout.dim(dim)] is None:
        return along_dim(function, x, dim, *args, **kwargs)
    dim = layout.dim(dim)
    needs_reduction(layout, (dim,), function.__name__)
    dtype = kwargs.get("dtype") or next((given for given in args if isinstance(given, torch.dtype)), None)
    shard = local(x) if dtype is None else local(x).to(dtype)
    comm = layout.grid.tiles
    shifted = shard - _largest(shard, dim, comm)
    powers = shifted.exp()
    total = enter_shards(sum_over_shards(powers.sum(dim, keepdim=True), comm), comm)
    return wrap(powers / total if function.__name__ == "softmax" else shifted - total.log(), layout)


def _largest(shard: Tensor, dim: int, comm: Any) -> Tensor:
    """Returns the maximum over a dim and all ranks. No gradient: softmax does not depend on the shift."""
    with torch.no_grad():
        if shard.is_meta:
            return shard.sum(dim, keepdim=True)
        shape = [1 if d == dim else extent for d, extent in enumerate(shard.shape)]
        largest = shard.amax(dim, keepdim=True) if shard.shape[dim] else shard.new_full(shape, -torch.inf)
        return comm.allreduce(largest, "max")


for _name in ("softmax", "log_softmax"):
    for _function in functions_named(_name):
        RULES[_function] = partial(_softmax, _function)
