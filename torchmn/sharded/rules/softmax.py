"""softmax along cut dims: attention over all pixels of an image, as spatial attention and soft-argmax have it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchmn.sharded.registry import functions_named
from torchmn.sharded.replicated import enter_parts, sum_of_parts
from torchmn.sharded.rules.reductions import along, crosses
from torchmn.sharded.tensor import RULES, ShardedTensor, local, wrap


def _softmax(function: Any, x: ShardedTensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """softmax or log_softmax. Along a cut dim ranks take the largest of all elements, and add up."""
    layout = x.spec
    if not isinstance(dim, int) or not layout.is_tile or layout.cuts[layout.dim(dim)] is None:
        return along(function, x, dim, *args, **kwargs)
    dim = layout.dim(dim)
    crosses(layout, (dim,), function.__name__)
    dtype = kwargs.get("dtype") or next((given for given in args if isinstance(given, torch.dtype)), None)
    mine = local(x) if dtype is None else local(x).to(dtype)
    comm = layout.grid.tiles
    shifted = mine - _largest(mine, dim, comm)
    powers = shifted.exp()
    total = enter_parts(sum_of_parts(powers.sum(dim, keepdim=True), comm), comm)
    return wrap(powers / total if function.__name__ == "softmax" else shifted - total.log(), layout)


def _largest(mine: Tensor, dim: int, comm: Any) -> Tensor:
    """The largest elements of all ranks along a dim; any shift gives the same, so it needs no gradient."""
    with torch.no_grad():
        if mine.is_meta:
            return mine.sum(dim, keepdim=True)
        shape = [1 if d == dim else extent for d, extent in enumerate(mine.shape)]
        largest = mine.amax(dim, keepdim=True) if mine.shape[dim] else mine.new_full(shape, -torch.inf)
        return comm.allreduce(largest, "max")


for _name in ("softmax", "log_softmax"):
    for _function in functions_named(_name):
        RULES[_function] = partial(_softmax, _function)
