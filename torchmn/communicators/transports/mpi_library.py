"""Settings of the MPI library: whether it reads GPU memory, and how much memory it reserves at its start."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

# Each of these switches on the GPU support of an MPI library, which then reads GPU memory directly.
_GPU_SWITCHES = ("TORCHMN_GPU_AWARE_MPI", "MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "I_MPI_OFFLOAD")


def reads_gpu_memory(environ: os._Environ[str] | dict[str, str] = os.environ) -> bool:
    """Returns whether MPI can read GPU memory, by `TORCHMN_GPU_AWARE_MPI` or else by the switches of MPI libraries."""
    for switch in _GPU_SWITCHES:
        value = environ.get(switch)
        if value is not None:
            return value != "0"
    return False


@contextmanager
def small_unused_buffers(launcher: str, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """In this block, which loads MPI, UCX below MPICH reserves 0.3 MB of shared memory per rank instead of 4.

    MPICH does not send messages within a host through UCX, and needs UCX's shared memory only to find that ranks reach
    each other. (Without it, with `UCX_TLS=^sm`, MPI_Init fails in a container without a network.) Nothing is changed
    for other MPI libraries, which use it, or if the user has set a variable of UCX.
    """
    settings = {"UCX_MM_FIFO_SIZE": "16", "UCX_MM_RX_BUFS_GROW": "16"}
    if launcher != "mpich" or any(name.startswith("UCX_") for name in environ):
        settings = {}
    environ.update(settings)
    try:
        yield
    finally:
        for name in settings:  # not for processes that this one starts: they may use another MPI library
            del environ[name]
