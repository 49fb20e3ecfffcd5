"""How gloo connects ranks: at an address of each rank's host that the other hosts can reach."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchmn.communicators.addresses import facing, is_loopback, named


def told_to_all(store: dist.Store, what: str, value: Any, rank: int, size: int) -> list[Any]:
    """What every rank tells, in rank order: an allgather_obj for ranks that are not connected yet."""
    store.set(f"{what}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{what}/{peer}")) for peer in range(size)]


def address_to_offer(store: dist.Store, rank: int, size: int, meeting_place: str) -> str | None:
    """The address at which the other ranks are to find this one; None where gloo's own choice will do.

    gloo takes the address that the host's name leads to. On a Debian that is 127.0.1.1, and where the name has none,
    127.0.0.1: ranks of other hosts would connect to themselves. But they have reached `meeting_place`, which is
    MASTER_ADDR: the address that faces it will do.
    """
    own = facing(meeting_place)
    faced = told_to_all(store, "address", own, rank, size)
    outside = [address for address in faced if address and not is_loopback(address)]
    by_name = named()
    if os.environ.get("GLOO_SOCKET_IFNAME") or not outside or (by_name and not is_loopback(by_name)):
        return None
    # On the host of MASTER_ADDR that name may lead to a loopback address, too: there, face another host.
    return own if own in outside else facing(outside[0])


def connect(store: dist.Store, rank: int, size: int, patience: timedelta, address: str | None) -> Any:
    """gloo's process group, when all ranks are connected."""
    if address is None:
        return dist.ProcessGroupGloo(store, rank, size, patience)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = patience
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)
