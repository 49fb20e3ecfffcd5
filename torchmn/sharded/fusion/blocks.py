"""Values that stay, from one convolution to the next, in the blocks of channels in which oneDNN computes.

On a CPU each of torch's convolutions turns its input into such blocks and its output back, and its backward does so
with four more tensors. Where nobody but convolutions and ReLUs sees a value, it need not be turned back: the same
numbers, bit by bit, in 6 % less time on tiles of 64x128 and 13 % less on 256x512, where memory is what it waits for.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from torchmn._torch_compat import count_dispatch_modes, mkldnn_nbytes, top_saved_tensor_hooks

# Blocks are of 8 or 16 channels. Those of other numbers of channels would be filled up: more memory than the values.
_CHANNELS = 16
# What fits into a core's own cache is turned quickly: chains of two lost up to 10 % with 256 KB or less.
_LEAST_BYTES = 512 << 10
_PAGE_BYTES = 4096
_IS_KNOWN = (
    torch.backends.mkldnn.is_available()
    and platform.machine() in ("x86_64", "AMD64")
    and hasattr(torch.ops.mkldnn, "data_ptr")
    # With torch 2.6 the second is None: whether a hook would see blocks is unknown.
    and None not in (mkldnn_nbytes, top_saved_tensor_hooks)
)


def may_stay_in_blocks(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether what convolutions with these weights make of `x`, one after the other, should stay in blocks in between.

    All of them leave an image as large as it is. Not where somebody would see values that are like no other tensor:
    hooks on saved tensors, dispatch modes.
    """
    return (
        _IS_KNOWN
        and x.dtype is torch.float32
        and x.is_cpu
        and x.is_contiguous()  # channels_last has convolutions of its own, without blocks
        and x.numel() > 0
        and all(_is_worth_it(x, weight.shape[0]) for weight in weights[:-1])
        and all(weight.is_contiguous() for weight in weights)
        and torch.backends.mkldnn.enabled
        and top_saved_tensor_hooks(True) is None
        and not count_dispatch_modes()
    )


def _is_worth_it(x: Tensor, channels: int) -> bool:
    return channels % _CHANNELS == 0 and x.nbytes // x.shape[1] * channels >= _LEAST_BYTES


def blocks(x: Tensor) -> Tensor:
    """`x` in blocks, if it is not yet."""
    return x if x.is_mkldnn else x.to_mkldnn()


def room(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory for a contiguous tensor, whose place in the heap blocks may take when it is gone.

    oneDNN wants pages, and malloc finds none in a hole that is just as large as the blocks: without a few pages more
    the heap of most processes grew by a tensor or two.
    """
    numel = prod(shape)
    more = 4 * _PAGE_BYTES // like.element_size()
    return torch.empty(numel + more, dtype=like.dtype, device="cpu")[:numel].view(shape)


def relu_in_blocks_(x: Tensor) -> None:
    """ReLU in place. oneDNN's own makes 0 of NaN, which would hide that a model diverges.

    It needs no knowledge of the blocks: element by element they are memory like any other.
    """
    memory = _bytes(mkldnn_nbytes(x)).from_address(torch.ops.mkldnn.data_ptr.default(x))
    torch.frombuffer(memory, dtype=torch.float32).relu_()


@lru_cache(maxsize=256)
def _bytes(count: int) -> type[ctypes.Array[ctypes.c_byte]]:
    """So many bytes, to ctypes: a class of their own, which takes as long to make as a small ReLU."""
    return ctypes.c_byte * count
