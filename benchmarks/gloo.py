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
    store = dist.TCPStore("127.0.0.1", free_port(comm), comm.size, comm.rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)


def free_port(comm: MPI.Comm = MPI.COMM_WORLD) -> int:
    """A port that was free on rank 0's host a moment ago, the same on all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return comm.bcast(free.getsockname()[1])
