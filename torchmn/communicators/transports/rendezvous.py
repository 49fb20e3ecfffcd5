"""Opens torch's key-value store between ranks that can already exchange objects, such as over MPI."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torchmn.communicators.launchers.addresses import LOOPBACK, network, of_this_host
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.errors import LaunchError

CONNECT_SECONDS = 10.0


def open_store_between(
    rank: int,
    size: int,
    bcast: Callable[[Any], Any],
    allgather: Callable[[Any], list[Any]],
    operation: str,
) -> tuple[dist.Store, str]:
    """Returns torch's key-value store, which rank 0 opens at a free port, and its address.

    Args:
        rank: of this process.
        size: number of ranks.
        bcast: returns rank 0's object on every rank.
        allgather: returns the list of all ranks' objects.
        operation: its name, for messages.

    Raises:
        LaunchError: on every rank, if a rank does not reach rank 0.
    """
    networks = allgather(network())
    addresses = [LOOPBACK] if len(set(networks)) == 1 and networks[0] is not None else of_this_host()
    server = None
    if rank == 0:
        server = dist.TCPStore(addresses[0], 0, size, is_master=True, wait_for_workers=False)
    addresses, port = bcast((addresses, server.port) if server else None)
    address = None if server else _reachable(addresses, port)
    connected = allgather(server is not None or address is not None)
    if failed := [each for each, found in enumerate(connected) if not found]:
        raise LaunchError(
            f"rank {rank} of {size}: {operation}: rank {ranks_text(failed)} does not reach rank 0 at port "
            f"{port} of {', '.join(addresses)}. Does a firewall close it?"
        )
    if server is not None:
        return server, addresses[0]
    assert address is not None
    return dist.TCPStore(address, port, size, is_master=False), address


def _reachable(addresses: list[str], port: int) -> str | None:
    """Returns the first address with an open port; None if there is none."""
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
        except OSError:
            continue
        return address
    return None
