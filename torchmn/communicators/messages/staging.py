"""Copies of tensors into memory that a transport can read."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn._torch_compat import is_zero_tensor


def to_host(x: Tensor) -> Tensor:
    """Returns a contiguous copy of `x` in host memory, pinned for a fast copy from the GPU."""
    pinned = torch.cuda.is_available()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned, device="cpu")
    # A blocking copy: the transport reads the memory as soon as this returns.
    return host.copy_(x)


def plain_memory(x: Tensor, on_host: bool) -> Tensor:
    """Returns `x` detached and contiguous, with memory that holds its values; `x` itself if it is so already.

    Args:
        x: a dense tensor.
        on_host: whether the memory must be on the host.
    """
    if is_zero_tensor(x):  # zeros without memory, which autograd may produce
        x = x.detach().clone()
    if x.is_conj() or x.is_neg():  # lazy flags: the memory does not hold the values of the tensor
        x = x.detach().resolve_conj().resolve_neg()
    elif x.requires_grad:
        x = x.detach()
    if x.is_cuda and on_host:
        return to_host(x)
    return x if x.is_contiguous() else x.contiguous()
