"""Digests of long values, by which ranks compare them. Unlike those of `hash`, they are the same in every process."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from zlib import crc32

import numpy as np
from torch import Tensor

from torchmn.communicators.messages import wire

Digestible = str | bytes | np.ndarray | Tensor


def digest_of(parts: Iterable[Digestible], size: int = 8) -> str:
    """Returns a hexadecimal digest of `size` bytes, of all parts in their order.

    The digest of tensors, which must be dense, and arrays includes dtype, shape and values.
    """
    total = blake2b(digest_size=size)
    for part in parts:
        if isinstance(part, Tensor):
            part = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
            _add(total, f"{part.dtype} {tuple(part.shape)}".encode())
            _add(total, wire.as_bytes(part).numpy().data)
        elif isinstance(part, np.ndarray):
            _add(total, f"{part.dtype.str} {part.shape}".encode())
            _add(total, part.tobytes())
        else:
            _add(total, part if isinstance(part, bytes) else part.encode(errors="surrogateescape"))
    return total.hexdigest()


def checksum_of(x: Tensor) -> int:
    """Returns a checksum of the values of a dense tensor: five times as fast as a digest, for comparisons in a step."""
    data = wire.as_bytes(x.detach().cpu().resolve_conj().resolve_neg().contiguous())
    return crc32(data.numpy().data) if len(data) else 0


def number_of(text: str, size: int = 7) -> int:
    """Returns a number of `size` bytes for a text, not negative."""
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest(), "big")


def _add(total: blake2b, data: bytes | memoryview) -> None:
    # With the length: otherwise ("a", "bc") and ("ab", "c") would have the same digest.
    total.update(len(data).to_bytes(8, "little"))
    total.update(data)
