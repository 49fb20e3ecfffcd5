"""Script that `torchmn doctor` runs on each rank: do the ranks reach each other, and how fast?

    probe.py mpi        with mpi4py only
    probe.py torchmn    with TorchMN's communicator, on the launcher's transport

Rank 0 prints one line: a JSON object. The script is run by its path, so that `mpi` needs only mpi4py.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable

SIZES = (2**20, 4 * 2**20)
ROUNDS = 20


def main() -> None:
    sys.path.pop(0)  # this directory: its modules would shadow others of the same names
    answer = with_mpi4py() if sys.argv[1] == "mpi" else with_torchmn()
    if answer:
        # A single write, because launchers may mix the parts of lines of different ranks.
        os.write(1, (json.dumps(answer) + "\n").encode())


def with_mpi4py() -> dict | None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    hosts = comm.gather(socket.gethostname())
    total = comm.allreduce(comm.rank + 1)
    buffers = {size: bytearray(size) for size in SIZES}

    def turn(peer: int, size: int, send_first: bool) -> None:
        actions = [
            lambda: comm.Send([buffers[size], MPI.BYTE], peer),
            lambda: comm.Recv([buffers[size], MPI.BYTE], peer),
        ]
        for action in actions if send_first else reversed(actions):
            action()

    speeds = round_trips(comm.rank, comm.size, comm.Barrier, turn)
    return {"size": comm.size, "sum": total, "hosts": hosts, "speeds": speeds} if comm.rank == 0 else None


def with_torchmn() -> dict | None:
    import torch

    import torchmn

    with torchmn.create_communicator(timeout=60) as comm:
        hosts = comm.gather_obj(socket.gethostname())
        total = int(comm.allreduce(torch.tensor([comm.rank + 1]))[0])
        buffers = {size: torch.zeros(size, dtype=torch.uint8) for size in SIZES}

        def turn(peer: int, size: int, send_first: bool) -> None:
            actions = [lambda: comm.send(buffers[size], peer), lambda: comm.recv(peer)]
            for action in actions if send_first else reversed(actions):
                action()

        speeds = round_trips(comm.rank, comm.size, comm.barrier, turn)
        return {"size": comm.size, "sum": total, "hosts": hosts, "speeds": speeds} if comm.rank == 0 else None


def round_trips(
    rank: int, size: int, barrier: Callable[[], object], turn: Callable[[int, int, bool], None]
) -> dict[int, float]:
    """Returns the bytes per second between rank 0 and its slowest peer, by message size."""
    slowest: dict[int, float] = {}
    for peer in range(1, size):
        for nbytes in SIZES:
            barrier()
            if rank not in (0, peer):
                continue
            turn(peer if rank == 0 else 0, nbytes, rank == 0)  # untimed: it also connects the two
            begin = time.perf_counter()
            for _ in range(ROUNDS):
                turn(peer if rank == 0 else 0, nbytes, rank == 0)
            speed = 2 * ROUNDS * nbytes / (time.perf_counter() - begin)
            slowest[nbytes] = min(speed, slowest.get(nbytes, speed))
    return slowest


if __name__ == "__main__":
    main()
