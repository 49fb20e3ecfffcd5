"""Memory formats: results have the order of dims in memory that they have on one rank.

Torch keeps channels_last and transposed tensors so, and dropout draws its mask in the order of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """Returns the dims of `x` by descending stride, as torch orders them in a new tensor with this memory format."""
    if x.is_contiguous() and 1 not in x.shape:
        return list(range(x.dim()))
    dense = torch.empty_like(x, device="meta")  # an expanded tensor has strides of 0
    # A dim of extent 1 has the stride of its outer neighbour, which distinguishes channels_last with one channel.
    return sorted(range(x.dim()), key=lambda dim: (-dense.stride(dim), x.shape[dim] == 1))


def in_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """Returns a view of `x`, whose dims are in the order `order`, with the dims in their own order."""
    return x.permute([list(order).index(dim) for dim in range(x.dim())])


def empty_in_order(shape: Sequence[int], like: Tensor) -> Tensor:
    """Returns an uninitialised tensor of `shape` with the memory format of `like`."""
    order, strides, step = memory_order(like), [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    # Not a view of another tensor: autograd forbids in-place changes of views that a Function returns.
    return like.new_empty_strided(tuple(shape), strides)


def with_memory_format_of(result: Tensor, x: Tensor) -> Tensor:
    """Returns `result` with the memory format of `x`: channels_last or contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(x.dim(), torch.contiguous_format)
    if x.is_contiguous() or not x.is_contiguous(memory_format=wanted):
        wanted = torch.contiguous_format
    return result.contiguous(memory_format=wanted)
