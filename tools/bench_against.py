"""Whether the working tree is slower than another commit: the scripts of benchmarks/ on both, in turns.

    python tools/bench_against.py BASE
    python tools/bench_against.py BASE --scripts halo communicators --turns 5

Runs the working tree's scripts with the library of a temporary worktree of BASE and with that of the working tree: only
the library differs. In every turn BASE runs twice, as two contenders, and the order changes: how far the two are apart
is what this machine does to one and the same code. Prints the medians over turns of every figure. `slower`: by more
than 5 %, by more than twice that spread, and by more than what a waiver below adds. Exit status 1 if a figure is.

Other programs on the machine make all of this noise. Runs on 2 MPI ranks; about 15 minutes with 3 turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from golden import ROOT, checked_out

SCRIPTS = {
    "communicators": ["--rounds", "4"],
    "differentiable_send": ["--rounds", "2"],
    "pipeline": ["--rounds", "2"],
    "data_parallel": ["--rounds", "4", "--models", "MLP 784-1000-1000-10", "conv 20-50, fc 500"],
    "halo": ["--rounds", "7"],
    "tensor_parallel": ["--rounds", "3"],
    "sparse_autoencoder": ["--rounds", "9"],
}
DEFAULT = [script for script in SCRIPTS if script != "sparse_autoencoder"]  # BASE may have its inner modules elsewhere
LEAST_LIMIT, SPREADS = 0.05, 2
SCRIPT_SECONDS = 600


class Waiver(NamedTuple):
    """What figures may lose beyond the limit: a share, or seconds per operation."""

    figures: str  # a pattern
    share: float = 0.0
    seconds: float = 0.0


WAIVERS = (
    Waiver(r"^communicators: .*\b1 KB", seconds=10e-6),
    Waiver(r"^differentiable_send: .*\b1 KB", seconds=40e-6),
    Waiver(r"^halo: .*128x128", share=0.03),
)

Seconds = dict[str, float]
"""Of each figure, in one run."""


def measured(script: str, tree: Path) -> Seconds:
    """The figures of one run of the working tree's script with the library of `tree`."""
    with tempfile.TemporaryDirectory(prefix="torchmn-bench-") as directory:
        results = Path(directory, "results.json")
        launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", sys.executable]
        options = [*SCRIPTS[script], "--ours-only", "--json", str(results)]
        job = subprocess.run(
            [*launcher, str(ROOT / "benchmarks" / f"{script}.py"), *options],
            env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SCRIPT_SECONDS,
        )
        if job.returncode or not results.exists():
            raise RuntimeError(f"{script}.py failed: {job.stdout.strip()[-1000:]}")
        found = json.loads(results.read_text())
    if not Path(found["library"]).is_relative_to(tree):
        raise SystemExit(f"bench_against.py: expected the library of {tree}, got {found['library']}")
    return {
        f"{script}: {case}, {contender}": median(turns)
        for case, contenders in found["cases"].items()
        for contender, turns in contenders.items()
    }


def in_turns(script: str, trees: dict[str, Path], turns: int) -> dict[str, list[Seconds]]:
    """Every contender's runs of one script."""
    runs: dict[str, list[Seconds]] = {name: [] for name in trees}
    names = list(trees)
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if sys.stderr.isatty():
                print(f"\r\033[K{script}, turn {turn + 1} of {turns}: {name}", end="", file=sys.stderr, flush=True)
            runs[name].append(measured(script, trees[name]))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return runs


def row(figure: str, runs: dict[str, list[Seconds]]) -> list[str]:
    """The line of one figure; its last cell is the verdict."""
    one, two, now = (median(run[figure] for run in runs[name]) for name in ("BASE", "BASE again", "now"))
    base = median(run[figure] for name in ("BASE", "BASE again") for run in runs[name])
    spread = max(one, two) / min(one, two) - 1
    waived = [waiver.share + waiver.seconds / base for waiver in WAIVERS if re.search(waiver.figures, figure)]
    limit = max(LEAST_LIMIT, SPREADS * spread) + sum(waived)
    verdict = "ok" if now / base - 1 <= limit else "slower"
    cells = [figure, time_text(base), time_text(now), f"{now / base:.3f}", f"{spread:.1%}"]
    return [*cells, f"{limit:.1%}{' (waiver)' if waived else ''}", verdict]


def time_text(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def print_table(rows: list[list[str]]) -> None:
    header = ["figure", "BASE", "now", "ratio", "spread of BASE", "limit", ""]
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    for line in [header, *rows]:
        name, *cells = line
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print(f"{name:{widths[0]}}  {'  '.join(padded)}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a commit")
    parser.add_argument(
        "--scripts", nargs="+", choices=SCRIPTS, default=DEFAULT, metavar="NAME", help=" ".join(SCRIPTS)
    )
    parser.add_argument("--turns", type=int, default=3, help="runs of each contender; the median counts")
    options = parser.parse_args()
    rows, failed = [], []
    with checked_out(options.base) as tree:
        for script in options.scripts:
            try:
                runs = in_turns(script, {"BASE": tree, "now": ROOT, "BASE again": tree}, options.turns)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(f"{script}.py was not compared: {error}")
                continue
            rows += [row(figure, runs) for figure in runs["now"][0]]
    print_table(rows)
    slower = sum(line[-1] == "slower" for line in rows)
    print("\n".join([*failed, f"{slower} of {len(rows)} figures are slower"]))
    sys.exit(1 if slower or failed else 0)


if __name__ == "__main__":
    main()
