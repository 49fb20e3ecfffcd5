"""Contenders in separate processes that import neither TorchMN nor mpi4py, as their users start them.

In our processes a baseline would profit from what our communicator has set up, above all from a malloc that keeps freed
memory. Each rank of a benchmark starts one such process, requests turns from it, and sleeps while it runs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path


def free_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class BaselineProcess:
    """The process of one rank: `python torch_baselines.py`, with the environment variables of torch.distributed."""

    def __init__(self, rank: int, size: int, port: int):
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("torch_baselines.py"))],
            env=os.environ | place | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, contender: str, iterations: int) -> float:
        """Seconds per iteration of that contender, measured in the process."""
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


class Baseline:
    """A contender in a baseline process; with `alone`, only in that of rank 0."""

    def __init__(self, process: BaselineProcess, name: str, rank: int, alone: bool = False):
        self._process, self._name, self._runs = process, name, rank == 0 or not alone

    def turn(self, iterations: int) -> float:
        return self._process.turn(self._name, iterations) if self._runs else 0.0


def serve(
    makers: Mapping[str, Callable[[], Callable[[], object]]], barrier: Callable[[], object], alone: Container[str]
) -> None:
    """Run the turns that are requested on standard input, until it ends: a step to warm up, a barrier, the turn.

    Args:
        makers: for each contender, the function that creates its step at the first request.
        barrier: waits for the other processes.
        alone: contenders that run on rank 0 only.
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
