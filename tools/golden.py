"""Whether two commits compute the same bits: hashes of losses, gradients and parameters of five training steps.

    python tools/golden.py BASE                     the working tree beside the commit BASE
    python tools/golden.py BASE --only 'mpi 2 .*halo'   only cells whose line matches
    python tools/golden.py BASE --save FILE         keep the hashes of BASE, too
    python tools/golden.py FILE                     the working tree beside hashes that were kept on this machine

A cell is a transport, a number of ranks and a training (tools/golden_worker.py has them). BASE is checked out into a
temporary worktree; both trees run the worker of the working tree with this Python. Prints `equal` or `different` for
each cell, with the first number that differs, and what could not be compared because BASE lacks a name. Exit status 1
if a cell differs or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("golden_worker.py")
TRANSPORTS = ("mpi", "gloo", "threads")
JOB_SECONDS = 300.0
# Of errors with which BASE shows that it does not have what the worker asks for.
LACKING = ("ImportError", "ModuleNotFoundError", "AttributeError", "UnknownKeyword", "TypeError")

Result = dict[str, Any]
"""Of one cell: `ranks`, for each rank the pairs of label and hash, or `error`."""


def all_cells() -> dict[str, tuple[str, int, str]]:
    """Transport, number of ranks and training of every cell, by the text that is printed for it."""
    from golden_worker import cells

    found = {}
    for transport in TRANSPORTS:
        for size in (2, 3, 4):
            for name, (_, sizes, transports) in cells().items():
                if size in sizes and transport in transports:
                    found[f"{transport} {size} {name}"] = transport, size, name
    return found


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A worktree of `commit` that is removed at the end, also by SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="torchmn-golden-") as directory:
        tree = Path(directory, "base")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def results_of(trees: list[Path], chosen: dict[str, tuple[str, int, str]]) -> list[dict[str, Result]]:
    """The hashes of each chosen cell, computed with the library of each tree."""
    results: list[dict[str, Result]] = [{} for _ in trees]
    jobs: dict[tuple[str, int], list[str]] = {}
    for transport, size, name in chosen.values():
        jobs.setdefault((transport, size), []).append(name)
    for (transport, size), names in jobs.items():
        if sys.stderr.isatty():
            print(f"\r\033[K{transport}, {size} ranks: {len(names)} cells", end="", file=sys.stderr, flush=True)
        # Ranks of MPI poll for messages: more of them than cores take turns.
        with ThreadPoolExecutor(1 if transport == "mpi" else len(trees)) as pool:
            cells = pool.map(results_of_job, trees, repeat(transport), repeat(size), repeat(names))
            for found, more in zip(results, cells, strict=True):
                found |= {f"{transport} {size} {name}": result for name, result in more.items()}
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return results


def results_of_job(tree: Path, transport: str, size: int, names: list[str]) -> dict[str, Result]:
    """The results of these cells, in as many jobs as it takes: a cell that fails ends its job."""
    results: dict[str, Result] = {}
    while names:
        done, output = run_job(tree, transport, size, names)
        results |= done
        names = [name for name in names if name not in done]
        if names and not any("error" in result for result in done.values()):
            results[names[0]] = {"error": f"no result: {output}"}
            names = names[1:]
    return results


def run_job(tree: Path, transport: str, size: int, names: list[str]) -> tuple[dict[str, Result], str]:
    """The results of the cells that all ranks finished or that raised, and the end of what was printed."""
    with tempfile.TemporaryDirectory(prefix="torchmn-golden-") as directory:
        worker = [str(WORKER), transport, str(size), directory, *names]
        if transport == "threads":
            command = [sys.executable, *worker]
        else:
            launcher = ["-m", "torchmn.cli.main", "run", "-n", str(size), "--transport", transport]
            command = [sys.executable, *launcher, *worker]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TORCHMN_TIMEOUT": "60"}
        try:
            job = subprocess.run(
                command,
                cwd=directory,
                env=environment,
                timeout=JOB_SECONDS,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            output = job.stdout
        except subprocess.TimeoutExpired as late:
            output = f"still running after {JOB_SECONDS:.0f} s: {late.stdout!r}"
        lines = [read_lines(Path(directory, str(rank))) for rank in range(size)]
    for line in (line for rank in lines for line in rank):
        if not Path(line["library"]).is_relative_to(tree):
            raise SystemExit(f"golden.py: expected the library of {tree}, got {line['library']}")
    by_rank = [{line["cell"]: line for line in rank} for rank in lines]
    done: dict[str, Result] = {}
    for name in names:
        of_ranks = [rank[name] for rank in by_rank if name in rank]
        errors = [line["error"] for line in of_ranks if line["error"]]
        if errors:
            done[name] = {"error": min(errors, key=lambda error: error.startswith(("PeerError", "SystemExit")))}
        elif len(of_ranks) == size:
            done[name] = {"ranks": [line["hashes"] for line in of_ranks]}
    return done, " | ".join(output.strip().splitlines()[-3:])[-300:]


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # A rank that was killed may have left half a line.
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def verdict(base: Result | None, now: Result) -> tuple[str, str]:
    """`equal`, `different`, `failed` or `not in BASE`, and where the first difference is."""
    if base is None:
        return "not in BASE", "the kept hashes have no such cell"
    if "error" in base and "error" not in now and base["error"].startswith(LACKING):
        return "not in BASE", base["error"]
    if "error" in base or "error" in now:
        here = " and ".join(title for title, result in (("BASE", base), ("now", now)) if "error" in result)
        return "failed", f"{here}: {(now.get('error') or base['error']).splitlines()[0]}"
    if len(base["ranks"]) != len(now["ranks"]):
        return "different", f"hashes of {len(base['ranks'])} ranks, now of {len(now['ranks'])}"
    total = sum(map(len, now["ranks"]))
    differing = [
        (place, rank, old, new)
        for rank, pair in enumerate(zip(base["ranks"], now["ranks"], strict=True))
        for place, (old, new) in enumerate(zip(*pair, strict=False))
        if list(old) != list(new)
    ]
    if differing:
        _, rank, old, new = min(differing, key=lambda each: each[:2])
        label = new[0] if old[0] == new[0] else f"{old[0]!r}, now {new[0]!r}"
        ends = sum(new[0].startswith("end: ") for _, _, _, new in differing)
        return (
            "different",
            f"first in {label} on rank {rank}; {len(differing)} of {total} hashes, {ends} of them at the end",
        )
    if total != sum(map(len, base["ranks"])):
        return "different", f"{total} hashes, and BASE has {sum(map(len, base['ranks']))}"
    return "equal", ""


def machine() -> str:
    """What bits depend on besides the code."""
    models = (
        re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else []
    )
    return f"{models[0] if models else platform.processor()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a commit, or a file that --save wrote")
    parser.add_argument(
        "--only", metavar="REGEX", default="", help="cells whose line (`mpi 2 datapar/mlp/sgd`) matches"
    )
    parser.add_argument("--save", metavar="FILE", type=Path, help="keep the hashes of BASE")
    options = parser.parse_args()
    chosen = {line: cell for line, cell in all_cells().items() if re.search(options.only, line)}
    if not chosen:
        parser.error(
            f"--only {options.only!r} matches none of the {len(all_cells())} cells, such as {next(iter(all_cells()))!r}"
        )
    if Path(options.base).is_file():
        kept = json.loads(Path(options.base).read_text())
        if kept["machine"] != machine():
            print(f"The hashes were taken on {kept['machine']}; this is {machine()}: bits may differ for that alone.")
        base, (now,) = kept["cells"], results_of([ROOT], chosen)
    else:
        with checked_out(options.base) as tree:
            base, now = results_of([tree, ROOT], chosen)
    if options.save:
        options.save.write_text(json.dumps({"machine": machine(), "cells": base}))
    counts: dict[str, int] = {}
    for line in chosen:
        word, where = verdict(base.get(line), now[line])
        counts[word] = counts.get(word, 0) + 1
        print(f"{word:11} {line}{f': {where}' if where else ''}")
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    sys.exit(1 if counts.keys() & {"different", "failed"} else 0)


if __name__ == "__main__":
    main()
