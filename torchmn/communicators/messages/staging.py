"""Tensors as a transport can read them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn._torch_compat import is_zero_tensor


def to_host(x: Tensor) -> Tensor:
    """A contiguous copy of `x` in host memory, pinned so that the GPU writes it at full speed."""
    pinned = torch.cuda.is_available()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned, device="cpu")
    # A blocking copy: the transport reads the memory as soon as this returns.
    return host.copy_(x)


def plain_memory(x: Tensor, on_host: bool) -> Tensor:
    """`x` detached and contiguous, in memory that holds the numbers that it shows; `x` itself if it is that already.

    Args:
        on_host: whether that memory must be the host's.
    """
    if is_zero_tensor(x):  # as derivatives may be: zeros without memory
        x = x.detach().clone()
    if x.is_conj() or x.is_neg():  # lazy flags: the memory holds other numbers than the tensor shows
        x = x.detach().resolve_conj().resolve_neg()
    elif x.requires_grad:
        x = x.detach()
    if x.is_cuda and on_host:
        return to_host(x)
    return x if x.is_contiguous() else x.contiguous()
