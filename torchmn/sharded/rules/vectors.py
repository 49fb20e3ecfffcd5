"""The rule for linear: a cut vector is multiplied with this rank's columns of the weight, and summed over ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from torchmn.sharded.redistribute import gathered, replicated_operand, shard_like
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import rule
from torchmn.sharded.replicated import sum_over_shards
from torchmn.sharded.tensor import ShardedTensor, local, wrap


@rule("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns F.linear with a weight that is whole on every rank. (`nn.VectorLinear` holds only a slice of it.)"""
    weight, bias = gathered(weight), gathered(bias)
    if not isinstance(x, ShardedTensor):
        return F.linear(x, weight, bias)
    layout = x.spec
    last = len(layout.shape) - 1
    if layout.shape[last] != weight.shape[1]:
        refuse(f"linear expects {weight.shape[1]} input features, got {layout}")
    if layout.cuts[last] is None:
        bias = None if bias is None else replicated_operand(bias, layout)
        result = F.linear(local(x), replicated_operand(weight, layout), bias)
        return wrap(result, layout.with_dims((*layout.shape[:-1], weight.shape[0]), layout.cuts))
    if len(layout.cut_dims) > 1:
        refuse(f"linear along a cut dim of {layout}, of which other dims are cut too, is not supported")
    columns = shard_like(replicated_operand(weight, layout), layout, {1: last})
    result = sum_over_shards(F.linear(local(x), columns), layout.grid.tiles)
    return result if bias is None else result + bias.to(result.dtype)  # as autocast does
