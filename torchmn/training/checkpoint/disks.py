"""Which ranks share a disk, found out by writing: the directory exists and can be written, or nobody starts."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from torchmn.communicators.communicator import Communicator
from torchmn.training.checkpoint import disk
from torchmn.training.checkpoint.errors import CheckpointError

# More than file systems keep inside an inode: a full disk must fail here.
_PROBE_BYTES = 8192


def ranks_on_my_disk(comm: Communicator, operation: str, path: Path) -> list[int]:
    """The ranks that see the same directory at their own `path`, in order; makes the directory.

    Raises on all ranks if one of them can not write there (tried out: permissions do not tell it all).
    """
    token = comm.bcast_obj(secrets.token_hex(8))
    markers = [f".torchmn-probe-{token}-{rank}" for rank in range(comm.size)]

    def write() -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            disk.write_durably(path / markers[comm.rank], bytes(_PROBE_BYTES))
        except OSError as error:
            raise OSError(f"can not write to the directory {str(path)!r}: {error}") from error

    try:
        comm.attempt(operation, write, raises=CheckpointError)
        # By name, not by a listing: those may be some seconds old on network file systems.
        seen = [(path / marker).exists() for marker in markers]
        sees = comm.allgather_obj(seen)
    finally:
        with suppress(OSError):
            os.unlink(path / markers[comm.rank])
    return connected(comm.rank, sees)


def connected(rank: int, sees: list[list[bool]]) -> list[int]:
    """All ranks that see `rank`'s file, or whose file it sees, directly or through others."""
    group, waiting = {rank}, [rank]
    while waiting:
        here = waiting.pop()
        for other in range(len(sees)):
            if other not in group and (sees[here][other] or sees[other][here]):
                group.add(other)
                waiting.append(other)
    return sorted(group)
