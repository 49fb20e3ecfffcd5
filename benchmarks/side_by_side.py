"""Contenders timed in turns, so that they meet the same noise: medians, and ratios of medians."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path

import torch
from plain_process import Elsewhere

Contenders = Mapping[str, Callable[[], object] | Elsewhere]

OURS = ("ours", "copies", "unchecked", "exchange", "after", "during")
_kept: dict[str, float] = {}
_others_rest = False


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of a benchmark, `--json` among them, which tools/bench_against.py uses."""
    global _others_rest
    help_text = "write our own times there, in seconds; all other contenders get one turn, so that tables are rough"
    parser.add_argument("--json", type=Path, metavar="FILE", help=help_text)
    options = parser.parse_args()
    _others_rest = options.json is not None
    return options


def keep(title: str, seconds: float) -> None:
    """Note one of our own times for `--json`."""
    _kept[title] = seconds


def write_json(path: Path | None, rank: int) -> None:
    """Write the times that rank 0 has kept, and of which library they are."""
    import torchmn

    if path is not None and rank == 0:
        path.write_text(json.dumps({"library": torchmn.__file__, "seconds": _kept}))


def take_turns(contenders: Contenders, iterations: int, rounds: int, barrier: Callable[[], None]) -> dict[str, float]:
    """Seconds per iteration of each contender: the median over `rounds` turns of `iterations` each."""
    times = times_in_turns(contenders, iterations, rounds, barrier)
    return {name: statistics.median(values) for name, values in times.items()}


def times_in_turns(
    contenders: Contenders,
    iterations: int,
    rounds: int,
    barrier: Callable[[], None],
    groups: Sequence[Sequence[str]] | None = None,
) -> dict[str, list[float]]:
    """Seconds per iteration of each contender in each turn.

    groups: of contenders that run one right after the other, so that they are compared within the same seconds
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    groups = groups or [[name] for name in contenders]
    for turn in range(rounds + 1):
        # Another order each time, the same on all ranks: whoever runs after a heavy one finds the caches full of its
        # data and its threads still awake, and that must not always be the same one.
        shuffle = random.Random(turn)
        for group in shuffle.sample(groups, len(groups)):
            for name in shuffle.sample(group, len(group)):
                if _others_rest and turn > 1 and name.split()[0] not in OURS:
                    continue
                seconds = _turn(contenders[name], iterations, barrier)
                if turn:  # the first turn warms up
                    times[name].append(seconds)
    return times


def of_the_job(times: dict[str, list[float]]) -> dict[str, float]:
    """Seconds per iteration of each contender, whole job: a turn ends with its slowest rank. All ranks call it."""
    from mpi4py import MPI

    ranks: list[dict[str, list[float]]] = MPI.COMM_WORLD.allgather(times)
    return {name: statistics.median(map(max, zip(*(rank[name] for rank in ranks), strict=True))) for name in times}


def _turn(contender: Callable[[], object] | Elsewhere, iterations: int, barrier: Callable[[], None]) -> float:
    if isinstance(contender, Elsewhere):
        barrier()
        seconds = contender.turn(iterations)
        _sleep_until_all_are_here()
        return seconds
    contender()
    barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        contender()
    return (time.perf_counter() - start) / iterations


def alone(step: Callable[[], object], threads: int = 1) -> Callable[[], None]:
    """The step on rank 0 only; the other ranks sleep meanwhile, as if they were not there."""
    from mpi4py import MPI

    def run() -> None:
        if MPI.COMM_WORLD.rank == 0:
            torch.set_num_threads(threads)
            step()
            torch.set_num_threads(1)
        _sleep_until_all_are_here()

    return run


def _sleep_until_all_are_here() -> None:
    """A barrier that leaves the core to whoever still works; MPI's own keeps asking."""
    from mpi4py import MPI

    done = MPI.COMM_WORLD.Ibarrier()
    while not done.Test():
        time.sleep(1e-4)


def environment(extra: str = "") -> str:
    """One line that dates a result."""
    return f"{date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}" + (
        f", {extra}" if extra else ""
    )


def size_text(nbytes: int) -> str:
    """`1 KB`, `4 MB`."""
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in [header, *rows]
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
    return "\n".join(lines)
