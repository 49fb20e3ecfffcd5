"""Connects the ranks of a gloo process group: the store, the address of each rank, and their authentication."""

from __future__ import annotations

import hmac
import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any

import torch.distributed as dist

from torchmn._torch_compat import gloo_options
from torchmn.communicators.launchers.addresses import LOOPBACK, address_of_hostname, facing, is_loopback, network
from torchmn.communicators.launchers.environment import STORE_VARIABLE, Launch
from torchmn.communicators.messages import wire
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.errors import DOCUMENTATION, LaunchError

_PROOF = 4  # gloo's tag of the messages by which ranks prove their identity
_PROOF_BYTES = 32
_LONGER = 3.0  # seconds that gloo may need to end a wait after its time


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a job find each other.

    Attributes:
        store: torch's key-value store that all ranks use.
        address: at which this rank listens; None: gloo chooses one.
        secret: known only to ranks of this job; None if other users can read the store.
    """

    store: dist.Store
    address: str | None = None
    secret: bytes | None = None


def open_store(launch: Launch, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Returns the store of the job, and whether other users cannot read it.

    Ranks of `torchmn run` use a file in a directory that only their user may enter. Other ranks use torch's store at
    MASTER_ADDR and MASTER_PORT, which any process that reaches it can read.
    """
    path = os.environ.get(STORE_VARIABLE) if launch.name == "torchmn" else None
    if path is None and "MASTER_PORT" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # As torch's rendezvous, which waits for all ranks and does not name the missing ones.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_master = launch.rank == 0
        return dist.TCPStore(
            address, port, launch.size, is_master, timeout, wait_for_workers=False, multi_tenant=True
        ), False
    if path is None:
        return next(dist.rendezvous("env://", launch.rank, launch.size or 1, timeout=timeout))[0], False
    if not Path(path).parent.is_dir():  # torch would wait for it until the timeout
        raise FileNotFoundError(f"{STORE_VARIABLE}={path}: its directory was removed when the job that made it ended")
    store = dist.FileStore(path)
    store.set_timeout(timeout)
    return store, True


def allgather_by_store(store: dist.Store, key: str, value: Any, rank: int, size: int) -> list[Any]:
    """Returns every rank's `value`, which JSON can represent, in rank order: for ranks that are not connected yet.

    Raises:
        LaunchError: some ranks have not called this within the timeout of the store.
    """
    keys = [f"{key}/{peer}" for peer in range(size)]
    store.set(keys[rank], json.dumps(value))
    try:
        store.wait(keys)
    except RuntimeError:
        missing = [peer for peer in range(size) if not store.check([keys[peer]])]
        if not missing:
            raise
        absent = ranks_text(missing)
        raise LaunchError(
            f"rank {rank} of {size}: {size - len(missing)} of {size} ranks came before the timeout (TORCHMN_TIMEOUT), "
            f"rank {absent} did not. Look at the output of rank {absent}, and check that every rank calls "
            "create_communicator, and that WORLD_SIZE is the number of ranks that were started"
        ) from None
    return [json.loads(store.get(each)) for each in keys]


def shared_secret(store: dist.Store, rank: int) -> bytes:
    """Returns random bytes that rank 0 draws and every rank reads: for a store that other users cannot read."""
    if rank == 0:
        store.set("secret", os.urandom(32).hex())
    return bytes.fromhex(store.get("secret").decode())


def listen_address(store: dist.Store, rank: int, size: int, master: str) -> str | None:
    """Returns the address at which this rank should listen; None if gloo's choice works.

    Ranks that share one network namespace (of a host, or a container) listen on the loopback interface only. Otherwise
    gloo takes the address of the host's name. On Debian that is 127.0.1.1, and for a name without an address 127.0.0.1:
    ranks of other hosts would connect to themselves. All ranks have reached `master`, which is MASTER_ADDR, so the
    address of the interface that leads there works.
    """
    own = facing(master)
    gathered = allgather_by_store(store, "address", (own, network()), rank, size)
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    networks = {name for _, name in gathered}
    if len(networks) == 1 and None not in networks:
        return LOOPBACK
    outside = [address for address, _ in gathered if address and not is_loopback(address)]
    by_name = address_of_hostname()
    if not outside or (by_name and not is_loopback(by_name)):
        return None
    # On the host of MASTER_ADDR that name may be a loopback address, too: there, take the way to another host.
    return own if own in outside else facing(outside[0])


def connect(rendezvous: Rendezvous, name: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns gloo's process group of the communicator `name`, when all ranks are connected.

    Raises:
        LaunchError: a process without the secret of this job has connected as one of its ranks.
    """
    deadline = monotonic() + timeout.total_seconds()
    store = dist.PrefixStore(f"{name}/gloo", rendezvous.store)
    if rendezvous.address is None:
        group = dist.ProcessGroupGloo(store, rank, size, timeout)
    else:
        group = dist.ProcessGroupGloo(store, rank, size, gloo_options(timeout, rendezvous.address))
    if rendezvous.secret is not None:
        left = timedelta(seconds=max(1.0, deadline - monotonic()))
        _authenticate(group, rendezvous.secret, name, rank, size, left)
    return group


def _authenticate(group: Any, secret: bytes, name: str, rank: int, size: int, timeout: timedelta) -> None:
    """Makes each two ranks prove to each other within `timeout` that they have the secret.

    gloo listens on a port to which every user of the host can connect, and accepts the first process that sends an
    easily guessed number as the rank that it waits for.
    """

    def proof(source: int, dest: int) -> bytes:
        return hmac.digest(secret, f"{name}: rank {source} to rank {dest}".encode(), "sha256")

    def refusal(peer: str, how: str) -> str:
        return (
            f"rank {rank} of {size}: {name}: the process that connected as {peer} does not have the secret of this job"
            f"{how}. Another user of this host interferes: see {DOCUMENTATION}/security.html"
        )

    others = [peer for peer in range(size) if peer != rank]
    received = {peer: wire.empty_bytes(_PROOF_BYTES) for peer in others}
    sent = {peer: wire.from_bytes(proof(rank, peer)) for peer in others}
    works = [(peer, group.recv([received[peer]], peer, _PROOF)) for peer in others]
    works += [(peer, group.send([sent[peer]], peer, _PROOF)) for peer in others]
    silent: dict[int, str] = {}
    limit = Timer(timeout.total_seconds() + _LONGER, _end, (refusal("another rank", " and sends no proof"),))
    limit.daemon = True
    limit.start()
    for peer, work in works:
        try:
            work.wait(timedelta(seconds=0.001) if silent else timeout)
        except RuntimeError as error:
            silent.setdefault(peer, str(error).partition("\n")[0])
    limit.cancel()
    for peer in others:
        if peer in silent or not hmac.compare_digest(wire.to_bytes(received[peer]), proof(peer, rank)):
            raise LaunchError(refusal(f"rank {peer}", f" ({silent[peer]})" if peer in silent else ""))


def _end(reason: str) -> None:
    """Ends this process: what a process without the secret sends may block gloo for ever."""
    sys.stderr.write(f"torchmn: {reason}\n")
    sys.stderr.flush()
    os._exit(1)
