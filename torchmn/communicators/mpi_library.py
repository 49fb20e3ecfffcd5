"""What the MPI library at hand can do."""

from __future__ import annotations

import os

# Each of these switches an MPI library's GPU support on, and the library then reads GPU memory itself.
_GPU_SWITCHES = ("TORCHMN_GPU_AWARE_MPI", "MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "I_MPI_OFFLOAD")


def reads_gpu_memory(environ: os._Environ[str] | dict[str, str] = os.environ) -> bool:
    """Whether MPI may be handed GPU memory. `TORCHMN_GPU_AWARE_MPI=0` or `=1` decides; MPI's own switches hint."""
    for switch in _GPU_SWITCHES:
        value = environ.get(switch)
        if value is not None:
            return value != "0"
    return False
