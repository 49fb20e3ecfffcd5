"""What the MPI library at hand can do, and what it is told before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

# Each of these switches an MPI library's GPU support on, and the library then reads GPU memory itself.
_GPU_SWITCHES = ("TORCHMN_GPU_AWARE_MPI", "MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "I_MPI_OFFLOAD")


def reads_gpu_memory(environ: os._Environ[str] | dict[str, str] = os.environ) -> bool:
    """Whether MPI may be handed GPU memory. `TORCHMN_GPU_AWARE_MPI=0` or `=1` decides; MPI's own switches hint."""
    for switch in _GPU_SWITCHES:
        value = environ.get(switch)
        if value is not None:
            return value != "0"
    return False


@contextmanager
def small_unused_buffers(launcher: str, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """While MPI is loaded: let UCX below MPICH set up 0.3 MB of shared memory per rank in place of 4.

    MPICH passes messages within a host through memory of its own, and needs UCX's only to find that ranks reach each
    other. (Without it, `UCX_TLS=^sm`, a job in a container without a network ends in MPI_Init.) Other MPI libraries do
    use it, and whoever has set a variable of UCX decides himself: then nothing is done.
    """
    settings = {"UCX_MM_FIFO_SIZE": "16", "UCX_MM_RX_BUFS_GROW": "16"}
    if launcher != "mpich" or any(name.startswith("UCX_") for name in environ):
        settings = {}
    environ.update(settings)
    try:
        yield
    finally:
        for name in settings:  # processes that this one starts may use another MPI
            del environ[name]
