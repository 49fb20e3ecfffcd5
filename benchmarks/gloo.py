"""torch.distributed over gloo between the processes of an MPI job, for side-by-side runs."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from mpi4py import MPI


def start_gloo(comm: MPI.Comm = MPI.COMM_WORLD) -> None:
    """Make torch.distributed's default group, over gloo, of the ranks of `comm` on this host."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    port = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", comm.bcast(port), comm.size, comm.rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
