"""Tensors in the blocked memory format of oneDNN, from one convolution of a chain to the next.

On a CPU, each of torch's convolutions converts its input to blocks of channels and its output back, and its backward
converts four more tensors. Between convolutions and ReLUs of a chain these conversions are not needed. The results are
the same bit for bit, in 6 % less time on tiles of 64x128 and 13 % less on 256x512, which are bound by memory bandwidth.
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

# Blocks have 8 or 16 channels; other numbers of channels would be padded, which takes more memory.
_CHANNELS = 16
# Tensors in a core's cache are converted quickly: chains of two were up to 10 % slower with 256 KB or less.
_LEAST_BYTES = 512 << 10
_PAGE_BYTES = 4096
_IS_KNOWN = (
    torch.backends.mkldnn.is_available()
    and platform.machine() in ("x86_64", "AMD64")
    and hasattr(torch.ops.mkldnn, "data_ptr")
    # With torch 2.6 the second is None: it cannot be found out whether a hook would see blocks.
    and None not in (mkldnn_nbytes, top_saved_tensor_hooks)
)


def may_stay_in_blocks(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the values between convolutions of `x` with these weights should stay in blocks.

    False if hooks on saved tensors or dispatch modes would see tensors in blocks, on which most functions fail.

    Args:
        x: (batch, channel, *image). Every convolution keeps the size of the image.
        weights: of consecutive convolutions.
    """
    return (
        _IS_KNOWN
        and x.dtype is torch.float32
        and x.is_cpu
        and x.is_contiguous()  # convolutions of channels_last tensors do not use blocks
        and x.numel() > 0
        and all(_is_worth_it(x, weight.shape[0]) for weight in weights[:-1])
        and all(weight.is_contiguous() for weight in weights)
        and torch.backends.mkldnn.enabled
        and top_saved_tensor_hooks(True) is None
        and not count_dispatch_modes()
    )


def _is_worth_it(x: Tensor, channels: int) -> bool:
    return channels % _CHANNELS == 0 and x.nbytes // x.shape[1] * channels >= _LEAST_BYTES


def to_blocks(x: Tensor) -> Tensor:
    """Returns `x` in blocks."""
    return x if x.is_mkldnn else x.to_mkldnn()


def empty_for_blocks(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns an uninitialised contiguous tensor whose memory malloc can reuse for blocks after it is freed.

    oneDNN allocates memory aligned to pages, which does not fit into a hole of exactly the same size: without a few
    more pages, the heap of most processes grew by one or two tensors.
    """
    numel = prod(shape)
    more = 4 * _PAGE_BYTES // like.element_size()
    return torch.empty(numel + more, dtype=like.dtype, device="cpu")[:numel].view(shape)


def relu_in_blocks_(x: Tensor) -> None:
    """Applies ReLU in place to a tensor in blocks, whose memory is treated as a flat array.

    oneDNN's ReLU is not used: it turns NaN into 0, which would hide that a model diverges.
    """
    memory = _bytes(mkldnn_nbytes(x)).from_address(torch.ops.mkldnn.data_ptr.default(x))
    torch.frombuffer(memory, dtype=torch.float32).relu_()


@lru_cache(maxsize=256)
def _bytes(count: int) -> type[ctypes.Array[ctypes.c_byte]]:
    """Returns the ctypes class of an array of bytes. Cached: creating it takes as long as a small ReLU."""
    return ctypes.c_byte * count
