"""GPU tensors on their way through host memory, for transports that do not read GPU memory."""

from __future__ import annotations

import torch
from torch import Tensor


def to_host(x: Tensor) -> Tensor:
    """A contiguous copy of `x` in host memory, pinned so that the GPU writes it at full speed."""
    pinned = torch.cuda.is_available()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned, device="cpu")
    # A blocking copy: the transport reads the memory as soon as this returns.
    return host.copy_(x)
