"""How gloo connects ranks: where they meet, at which addresses they listen, and who the others are."""

from __future__ import annotations

import hmac
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchmn._torch_compat import gloo_options
from torchmn.communicators.launchers.addresses import LOOPBACK, facing, is_loopback, named, network
from torchmn.communicators.launchers.environment import STORE_VARIABLE, Launch
from torchmn.communicators.messages import wire
from torchmn.errors import LaunchError

_PROOF = 4  # gloo's tag of the messages by which ranks prove who they are
_PROOF_BYTES = 32


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other.

    `address`: where this rank listens; None: gloo finds one. `secret`: what only ranks of this job can read; None where
    everybody can read what the store holds.
    """

    store: dist.Store
    address: str | None = None
    secret: bytes | None = None


def open_store(launch: Launch, patience: timedelta) -> tuple[dist.Store, bool]:
    """The store where the ranks of a job meet, and whether it is closed to other users.

    Ranks of `torchmn run` meet in a file in a directory that only their user may enter. Otherwise it is torch's store
    at MASTER_ADDR and MASTER_PORT, which answers everybody who reaches it.
    """
    path = os.environ.get(STORE_VARIABLE) if launch.name == "torchmn" else None
    if path is None:
        return next(dist.rendezvous("env://", launch.rank, launch.size or 1, timeout=patience))[0], False
    if not Path(path).parent.is_dir():  # torch would wait for it
        raise FileNotFoundError(f"{STORE_VARIABLE}={path}: its directory is gone, and so is the job that made it")
    store = dist.FileStore(path)
    store.set_timeout(patience)
    return store, True


def told_to_all(store: dist.Store, what: str, value: Any, rank: int, size: int) -> list[Any]:
    """What every rank tells, in rank order: an allgather_obj for ranks that are not connected yet."""
    store.set(f"{what}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{what}/{peer}")) for peer in range(size)]


def secret_of_all(store: dist.Store, rank: int) -> bytes:
    """A number that rank 0 draws and every rank reads: for a store that others can not read."""
    if rank == 0:
        store.set("secret", os.urandom(32).hex())
    return bytes.fromhex(store.get("secret").decode())


def address_to_offer(store: dist.Store, rank: int, size: int, meeting_place: str) -> str | None:
    """The address at which the other ranks are to find this one; None where gloo's own choice will do.

    Ranks that share one network (of one host, or one container) listen on its loopback interface alone. Else gloo takes
    the address that the host's name leads to. On a Debian that is 127.0.1.1, and where the name has none, 127.0.0.1:
    ranks of other hosts would connect to themselves. But they have reached `meeting_place`, which is MASTER_ADDR: the
    address that faces it will do.
    """
    own = facing(meeting_place)
    told = told_to_all(store, "address", (own, network()), rank, size)
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    networks = {where for _, where in told}
    if len(networks) == 1 and None not in networks:
        return LOOPBACK
    outside = [address for address, _ in told if address and not is_loopback(address)]
    by_name = named()
    if not outside or (by_name and not is_loopback(by_name)):
        return None
    # On the host of MASTER_ADDR that name may lead to a loopback address, too: there, face another host.
    return own if own in outside else facing(outside[0])


def connect(meeting: Meeting, name: str, rank: int, size: int, patience: timedelta) -> Any:
    """gloo's process group of the communicator `name`, when all ranks are connected.

    Raises:
        LaunchError: somebody who does not have the secret of this job has connected in a rank's place.
    """
    store = dist.PrefixStore(f"{name}/gloo", meeting.store)
    if meeting.address is None:
        group = dist.ProcessGroupGloo(store, rank, size, patience)
    else:
        group = dist.ProcessGroupGloo(store, rank, size, gloo_options(patience, meeting.address))
    if meeting.secret is not None:
        _prove(group, meeting.secret, name, rank, size)
    return group


def _prove(group: Any, secret: bytes, name: str, rank: int, size: int) -> None:
    """Let each two ranks prove to each other that they have the secret.

    gloo listens on a port to which every user of the host can connect, and takes whoever comes first, with a number
    that is easily guessed, for the rank that it waits for.
    """

    def proof(source: int, dest: int) -> bytes:
        return hmac.digest(secret, f"{name}: rank {source} to rank {dest}".encode(), "sha256")

    others = [peer for peer in range(size) if peer != rank]
    received = {peer: wire.room(_PROOF_BYTES) for peer in others}
    sent = {peer: wire.from_bytes(proof(rank, peer)) for peer in others}
    works = [group.recv([received[peer]], peer, _PROOF) for peer in others]
    works += [group.send([sent[peer]], peer, _PROOF) for peer in others]
    for work in works:
        work.wait()
    for peer in others:
        if not hmac.compare_digest(wire.to_bytes(received[peer]), proof(peer, rank)):
            raise LaunchError(
                f"rank {rank} of {size}: {name}: whoever connected as rank {peer} does not have the secret of this "
                "job. Another user of this host interferes: see docs/security.md"
            )
