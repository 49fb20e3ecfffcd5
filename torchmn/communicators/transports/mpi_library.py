"""The MPI library: how it is loaded and started, whether it reads GPU memory, and how much memory it reserves."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from torchmn.communicators.launchers import pmi
from torchmn.communicators.watchdog.observer_process import shared_memory_files
from torchmn.errors import LaunchError

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


def load(rank: int) -> Any:
    """Returns mpi4py's module MPI, with MPI initialized.

    Args:
        rank: of this process, for errors.

    Raises:
        LaunchError: MPI_Init would end the process, because the launcher does not serve this library.
        ImportError: there is no mpi4py.
        RuntimeError: there is no MPI library.
    """
    problem = pmi.used_up()
    if problem:
        raise LaunchError(f"rank {rank}: {problem}")
    import mpi4py

    if pmi.offered() == "pmix" and mpi4py.rc.initialize:
        # As with automatic initialization, but the library is known before.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, mpi4py.rc.finalize is not False
        from mpi4py import MPI

        if not MPI.Is_initialized():
            problem = pmi.unusable(MPI.Get_library_version())
            if problem:
                raise LaunchError(f"rank {rank}: {problem}")
            MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
    from mpi4py import MPI

    if MPI.Is_initialized():
        _unlink_shared_memory()
    return MPI


def _unlink_shared_memory() -> None:
    """Removes the names of MPICH's shared memory, which every rank of this host has mapped when MPI_Init returns.

    A job that is aborted or killed would leave the file, of about 2 MB. MPI_Finalize ignores that it is missing.
    """
    for path in shared_memory_files("self"):
        with suppress(OSError):  # another rank was first
            os.unlink(path)
