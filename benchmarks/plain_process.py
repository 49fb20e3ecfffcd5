"""A rival in processes of its own, as its users start it: they import neither TorchMN nor mpi4py.

A rival that ran in our processes would have what our communicator has set up in them, above all a malloc that keeps
freed memory (torchmn/communicators/allocator.py). Each rank of a benchmark starts one such process beside it, gives
it its turns, and sleeps while it runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping


class PlainProcess:
    """`python SCRIPT`, which calls `serve`, started by this rank with the usual variables of torch.distributed."""

    def __init__(self, script: str, rank: int, size: int, port: int):
        mine = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._process = subprocess.Popen(
            [sys.executable, os.path.join(os.path.dirname(__file__), script)],
            env=os.environ | mine | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, contender: str, iterations: int) -> float:
        """Seconds per iteration of that contender, on its own clock."""
        assert self._process.stdin and self._process.stdout
        print(contender, iterations, file=self._process.stdin, sep="\t", flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of {contender} ended with status {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class Elsewhere:
    """A contender of a plain process; only of rank 0's if it is `alone`."""

    def __init__(self, process: PlainProcess, name: str, rank: int, alone: bool = False):
        self._process, self._name, self._runs = process, name, rank == 0 or not alone

    def turn(self, iterations: int) -> float:
        return self._process.turn(self._name, iterations) if self._runs else 0.0


def serve(
    makers: Mapping[str, Callable[[], Callable[[], object]]], barrier: Callable[[], object], alone: Container[str]
) -> None:
    """Run contenders as they are asked for on standard input, until it ends: a step to warm up, a barrier, a turn.

    makers: what makes the step of each, when it is asked for first. `alone`: those that have no other ranks.
    """
    steps: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        name, iterations = line.rstrip("\n").split("\t")
        if name not in steps:
            steps[name] = makers[name]()
        step = steps[name]
        step()
        if name not in alone:
            barrier()
        start = time.perf_counter()
        for _ in range(int(iterations)):
            step()
        print((time.perf_counter() - start) / int(iterations), flush=True)
