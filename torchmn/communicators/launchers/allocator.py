"""glibc's malloc, told to keep what is freed.

By default it gives every large block back to the kernel and asks for it again at the next step; the page faults of
fresh memory then cost more than the copy or the message that it was for. Training allocates the same blocks over
and over, so keeping them is what it needs.

torch asks for aligned blocks, and glibc before 2.39 cuts each from a slightly larger one: the leftover of some 64 bytes
goes into a bin of small blocks, which are never joined with their neighbours. A gradient that is freed then leaves a
hole a little too small for the same gradient of the next step, and the heap grows for a while: by 5 to 20 MB in a
training with 7 MB of gradients. Without those bins (M_MXFAST) it stops at 3 or 4 MB; the cache that each thread has for
small blocks does the same on a smaller scale, but no program can switch it off while it runs.
"""

from __future__ import annotations

import ctypes
import os

_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = 1, -1, -3  # malloc.h
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
    wanted = {_M_MMAP_THRESHOLD: _HEAP_BYTES, _M_TRIM_THRESHOLD: _KEPT_BYTES, _M_MXFAST: 0}
    return all(mallopt(option, value) for option, value in wanted.items())


def _chosen_by_user(environ: os._Environ[str] | dict[str, str]) -> bool:
    return any(name.startswith("MALLOC_") and name.endswith("_") for name in environ)
