"""Configures glibc's malloc to keep freed memory for later allocations.

By default, malloc returns every large block to the kernel and requests it again at the next step. The page faults of
fresh memory then cost more than the copy or the message for which it is used. Training allocates the same blocks in
every step.

torch allocates aligned blocks, and glibc before 2.39 cuts each from a slightly larger one. The remainder of some 64
bytes goes into a bin of small blocks, which are never merged with their neighbours. A freed gradient then leaves a hole
that is slightly too small for the same gradient of the next step, and the heap grows for a while: by 5 to 20 MB in a
training with 7 MB of gradients. Without those bins (M_MXFAST) it stops at 3 or 4 MB. Each thread's cache of small
blocks has the same effect on a smaller scale, but cannot be switched off at run time.
"""

from __future__ import annotations

import ctypes
import os

_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = 1, -1, -3  # malloc.h
_KEPT_BYTES = 256 << 20
_HEAP_BYTES = 64 << 20


def keep_freed_memory(environ: os._Environ[str] | dict[str, str] = os.environ) -> bool:
    """Makes this process keep up to 256 MB of freed memory, in blocks of up to 64 MB. Returns whether it did.

    It does not if `TORCHMN_MALLOC=0`, if the user has set a `MALLOC_*_` variable, or with another allocator.
    """
    if environ.get("TORCHMN_MALLOC", "1") == "0" or environ.get("LD_PRELOAD") or _chosen_by_user(environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl, nor on macOS
    if mallopt is None:
        return False
    options = {_M_MMAP_THRESHOLD: _HEAP_BYTES, _M_TRIM_THRESHOLD: _KEPT_BYTES, _M_MXFAST: 0}
    return all(mallopt(option, value) for option, value in options.items())


def _chosen_by_user(environ: os._Environ[str] | dict[str, str]) -> bool:
    return any(name.startswith("MALLOC_") and name.endswith("_") for name in environ)
