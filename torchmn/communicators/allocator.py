"""glibc's malloc, told to keep what is freed.

By default it gives every large block back to the kernel and asks for it again at the next step; the page faults of
fresh memory then cost more than the copy or the message that it was for. Training allocates the same blocks over
and over, so keeping them is what it needs.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 256 << 20
_HEAP_BYTES = 64 << 20


def keep_freed_memory(environ: os._Environ[str] | dict[str, str] = os.environ) -> bool:
    """Let this process keep up to 256 MB of freed memory, in blocks of up to 64 MB; False if it was not done.

    `TORCHMN_MALLOC=0` forbids it; a user's own `MALLOC_*_` variables, and other allocators, are left alone.
    """
    if environ.get("TORCHMN_MALLOC", "1") == "0" or environ.get("LD_PRELOAD") or _chosen_by_user(environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl, nor on macOS
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def _chosen_by_user(environ: os._Environ[str] | dict[str, str]) -> bool:
    return any(name.startswith("MALLOC_") and name.endswith("_") for name in environ)
