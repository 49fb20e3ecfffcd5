"""In which order the elements of a tensor lie in memory: whole tensors lie as one process would have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """The dims of `x`, those first whose neighbours lie farthest apart: as torch lays out a new tensor like it."""
    if x.is_contiguous() and 1 not in x.shape:
        return list(range(x.dim()))
    dense = torch.empty_like(x, device="meta")  # of an expanded tensor, torch says where its dims go
    # A dim of one index has the stride of its outer neighbour: channels_last with one channel is known by it.
    return sorted(range(x.dim()), key=lambda dim: (-dense.stride(dim), x.shape[dim] == 1))


def in_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """A tensor whose dims were laid out in this order, with its dims where they belong."""
    return x.permute([list(order).index(dim) for dim in range(x.dim())])


def empty_in_order(shape: Sequence[int], like: Tensor) -> Tensor:
    """An empty tensor of `shape` that lies in memory as `like` does."""
    order, strides, step = memory_order(like), [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    # No view of another tensor: autograd lets nobody change one in place that was made inside of a function.
    return like.new_empty_strided(tuple(shape), strides)


def in_memory_as(result: Tensor, x: Tensor) -> Tensor:
    """`result`, channels_last if `x` is: so torch's own layers leave it, and dropout draws in the order of memory."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(x.dim(), torch.contiguous_format)
    if x.is_contiguous() or not x.is_contiguous(memory_format=wanted):
        wanted = torch.contiguous_format
    return result.contiguous(memory_format=wanted)
