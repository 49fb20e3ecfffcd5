"""Contenders timed in turns on the ranks of an MPI job, so that all of them meet the same noise."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from baseline_process import Baseline
from mpi4py import MPI

import torchmn

WORLD = MPI.COMM_WORLD
Contenders = Mapping[str, Callable[[], object] | Baseline]
Times = dict[str, list[float]]
"""Seconds per iteration of each contender in each turn."""


def two_ranks() -> torchmn.Communicator:
    """A communicator over MPI; a program on another number of ranks ends with an error."""
    torch.set_num_threads(1)
    if WORLD.size != 2:
        raise SystemExit(f"expected 2 ranks, got {WORLD.size}: start the script with mpiexec -n 2")
    return torchmn.create_communicator("mpi")


def take_turns(
    contenders: Contenders,
    options: argparse.Namespace,
    iterations: int = 1,
    factor: int = 1,
    groups: Sequence[Sequence[str]] | None = None,
) -> Times:
    """The times of all contenders; a turn takes as long as its slowest rank.

    Args:
        contenders: one iteration of each.
        options: `rounds` is the number of turns; with `ours_only`, contenders other than TorchMN get one.
        iterations: iterations per turn.
        factor: takes so many times as many turns.
        groups: contenders that run one directly after the other, because they are compared.
    """
    times: Times = {name: [] for name in contenders}
    groups = groups or [[name] for name in contenders]
    for turn in range(factor * options.rounds + 1):
        # The order changes, equally on all ranks: a contender that follows a heavy one finds the caches full of other
        # data, and that must not always be the same one.
        shuffle = random.Random(turn)
        for group in shuffle.sample(groups, len(groups)):
            for name in shuffle.sample(group, len(group)):
                if options.ours_only and turn > 1 and not name.startswith("TorchMN"):
                    continue
                seconds = _turn(contenders[name], iterations)
                if turn:  # the first turn warms up
                    times[name].append(seconds)
    ranks = WORLD.allgather(times)
    return {name: list(map(max, zip(*(rank[name] for rank in ranks), strict=True))) for name in times}


def _turn(contender: Callable[[], object] | Baseline, iterations: int) -> float:
    if isinstance(contender, Baseline):
        WORLD.Barrier()
        seconds = contender.turn(iterations)
        _sleep_until_all_arrive()
        return seconds
    contender()
    WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        contender()
    return (time.perf_counter() - start) / iterations


def alone(step: Callable[[], object], threads: int = 1) -> Callable[[], None]:
    """The step on rank 0 only, while the other ranks sleep."""

    def run() -> None:
        if WORLD.rank == 0:
            torch.set_num_threads(threads)
            step()
            torch.set_num_threads(1)
        _sleep_until_all_arrive()

    return run


def _sleep_until_all_arrive() -> None:
    """A barrier that leaves the core to other processes; MPI's barrier polls."""
    done = WORLD.Ibarrier()
    while not done.Test():
        time.sleep(1e-4)


def size_text(nbytes: int) -> str:
    """`1 KB`, `4 MB`."""
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"
