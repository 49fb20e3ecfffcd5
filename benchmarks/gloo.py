"""torch.distributed over gloo between the processes of an MPI job on one host."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from baseline_process import free_port
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


def start_gloo() -> None:
    """Create torch.distributed's default process group over gloo."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", common_port(), WORLD.size, WORLD.rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=WORLD.rank, world_size=WORLD.size)


def common_port() -> int:
    """A free TCP port of rank 0's host, the same on all ranks."""
    return WORLD.bcast(free_port())
