"""`init_process_group`: torch.distributed's default group with the ranks of a communicator.

TorchMN does not need it. DDP, `DistributedSampler`, torchmetrics and other libraries do.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.communicators.launchers.addresses import interface_of, is_loopback
from torchmn.communicators.transports.gloo import listen_address
from torchmn.communicators.transports.rendezvous import open_store_between

_OPERATION = "init_process_group"
_INTERFACE = "GLOO_SOCKET_IFNAME"


def init_process_group(comm: Communicator, backend: str | None = None, timeout: timedelta | None = None) -> None:
    """Creates torch.distributed's default process group of the ranks of `comm`; all of them must call.

        comm = torchmn.create_communicator()      # under mpiexec, srun, torchrun or alone
        torchmn.init_process_group(comm)
        sampler = torch.utils.data.DistributedSampler(data)

    No environment variable is needed: ranks agree on an address by `comm`. If a default group of these ranks exists,
    nothing is done. It ends with `torch.distributed.destroy_process_group()`; a gloo group also at exit.

    Args:
        comm: communicator whose ranks are processes.
        backend: of torch.distributed; by default nccl if `comm.device` is a GPU, else gloo.
        timeout: of the group's operations; None for torch's default.

    Raises:
        ArgumentError: on every rank, if ranks are threads, or the process has a default group of other ranks.
        MismatchError: on every rank, if arguments differ, or some ranks only have a default group.
        LaunchError: on every rank, if a rank does not reach rank 0.
    """
    comm = as_communicator(comm, _OPERATION)
    if backend is None:
        backend = "nccl" if comm.device.type == "cuda" else "gloo"
    exists = dist.is_initialized()
    comm.agree(_OPERATION, _problem(comm, exists), **{"backend": backend, "timeout": timeout, "has a group": exists})
    if exists:
        return
    store, master = open_store_between(comm.rank, comm.size, comm.bcast_obj, comm.allgather_obj, _OPERATION)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    with _listening_at(listen_address(store, comm.rank, comm.size, master)):
        dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, **options)
    if backend == "gloo":
        atexit.register(_destroy_at_exit)


def _destroy_at_exit() -> None:
    """Ends a default group that the program has left open.

    gloo's threads may otherwise release tensors while the interpreter shuts down, which aborts the process. nccl groups
    are left to torch: ending one may wait for the other ranks.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _problem(comm: Communicator, exists: bool) -> str | None:
    """Returns why this process cannot have the default group, or None."""
    if comm.traits.shares_process and comm.size > 1:
        return "expected ranks that are processes, got threads, which share one default group: use mpiexec or torchrun"
    if exists and (dist.get_rank(), dist.get_world_size()) != (comm.rank, comm.size):
        return (
            f"torch.distributed has a default group of {dist.get_world_size()} ranks, in which this is rank "
            f"{dist.get_rank()}; the communicator has {comm.size} ranks, and this is rank {comm.rank}. Call "
            "torch.distributed.destroy_process_group() before, or pass the communicator of the group's ranks"
        )
    return None


@contextmanager
def _listening_at(address: str | None) -> Iterator[None]:
    """Context in which gloo listens at an address of this host; None: at that of the host's name.

    On several hosts this remains so for later groups, such as of `torch.distributed.new_group`.
    """
    interface = interface_of(address) if address is not None else None
    if address is None or interface is None or os.environ.get(_INTERFACE):
        yield
        return
    os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        if is_loopback(address):
            del os.environ[_INTERFACE]
