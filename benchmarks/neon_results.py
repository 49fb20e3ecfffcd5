"""Test errors of neon's MNIST networks on one rank and on two, in each mode; writes the table of docs/from-neon.md.

    make neon-results                  # MNIST=DIR if the files are not in ~/.cache/torchmn/mnist
    python benchmarks/neon_results.py --networks "MLP 784-512-10" --modes datapar
    python benchmarks/neon_results.py --epochs 1 --sample     # short: the sample of MNIST, the page is not written

The exit status is 1 if a test error is outside its bounds (not of a short run), or if two ranks do not give the numbers
of one. Trains in
float64: in float32, rounding differences grow until an image is classified differently.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from torchmn.datasets import DatasetError, mnist
from torchmn.datasets.load_mnist import default_root

FILES = Path(__file__).parent / "neon"
PAGE = Path(__file__).parents[1] / "docs" / "from-neon.md"
BEGIN, END = "<!-- neon-results: begin -->", "<!-- neon-results: end -->"
MODES = ("datapar", "modelpar", "halopar")
RANKS = 2
ERROR, LOSS = "test misclassified_percentage", "test loss"
TOLERANCE = 1e-9
"""Largest relative difference between the test losses of one rank and of two."""
Rows = list[dict[str, float]]
"""The log of each epoch."""


@dataclass(frozen=True)
class Network:
    """A network, and the test error in percent that it must reach.

    Attributes:
        file: in `FILES`, without suffix.
        epochs: of training.
        reported: what neon reported.
        bounds: smallest and largest test error after all epochs; None if it is only measured.
    """

    file: str
    epochs: int
    reported: str
    bounds: tuple[float, float] | None

    @property
    def expected(self) -> str:
        if self.bounds is None:
            return "measured only"
        low, high = self.bounds
        return f"at most {high:g} %" if low == 0 else f"{low:g} to {high:g} %"


NETWORKS = {
    "MLP 784-512-10": Network("mnist_mlp-784-512-10", 15, "1.88 % after 100 epochs", (0.0, 2.3)),
    "MLP 784-200-200-200-10": Network("mnist_mlp-784-200-200-200-10", 10, "2.57 % after 10 epochs", (2.17, 2.97)),
    "convnet 20-50-500-10": Network("mnist_cnn-20-50-500-10", 2, "no number known", None),
}


@dataclass(frozen=True)
class Result:
    """Test errors of one network: on one rank, and on two in each mode, and whether they are as expected."""

    network: Network
    epochs: int
    errors: dict[str, float]
    difference: float | None
    """Largest relative difference of test losses; None without a mode."""

    @property
    def passed(self) -> bool:
        whole = self.epochs == self.network.epochs
        low, high = (self.network.bounds if whole else None) or (0.0, 100.0)
        same = (self.difference or 0.0) <= TOLERANCE and len(set(self.errors.values())) == 1
        return same and all(low <= error <= high for error in self.errors.values())

    def row(self, name: str) -> str:
        """Returns the row of the page's table."""
        errors = [f"{self.errors[key]:.2f} %" if key in self.errors else "-" for key in ("one rank", *MODES)]
        cells = [
            name,
            str(self.epochs),
            self.network.reported,
            self.network.expected,
            *errors,
            "-" if self.difference is None else f"{self.difference:.0e}",
        ]
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| network | epochs | neon | expected | 1 rank | 2 ranks, `datapar` | 2 ranks, `modelpar` | 2 ranks, `halopar` | "
    "difference of losses |\n|---|---|---|---|---|---|---|---|---|"
)


MISSING = """neon-results: the full MNIST is not in {folder}: {problem}
Pass its directory: make neon-results MNIST=DIR. Or download it:
python -c 'from torchmn.datasets import mnist; [mnist(s, download=True) for s in ("train", "test")]'"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=None, help="directory of the MNIST files")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), help="modes on two ranks")
    parser.add_argument("--epochs", type=int, default=None, help="fewer epochs; the page is not written")
    parser.add_argument("--sample", action="store_true", help="train on the included sample; the page is not written")
    options = parser.parse_args()
    folder = None if options.sample else (options.data or default_root()).expanduser()
    if folder is not None:
        folder = folder / "mnist" if (folder / "mnist").is_dir() else folder
        problem = data_problem(folder)
        if problem:
            print(MISSING.format(folder=folder, problem=problem), file=sys.stderr)
            return 2
    short = options.sample or options.epochs is not None
    results = {}
    for name in options.networks:
        results[name] = measure(name, folder, options.epochs or NETWORKS[name].epochs, options.modes)
        print(f"{HEADER}\n{results[name].row(name)}\n", flush=True)
        if not short:
            PAGE.write_text(updated_page(PAGE.read_text(), {name: results[name]}))
    failed = [name for name, result in results.items() if not result.passed]
    print(f"not as expected: {', '.join(failed)}" if failed else "all as expected")
    return 1 if failed else 0


def data_problem(folder: Path) -> str | None:
    """Why the folder does not hold the full MNIST; None if it does."""
    try:
        found = [len(mnist(split, folder)) for split in ("train", "test")]
    except DatasetError as error:
        return str(error)
    return None if found == [60000, 10000] else f"expected 60000 and 10000 images, got {found[0]} and {found[1]}"


def measure(name: str, folder: Path | None, epochs: int, modes: list[str]) -> Result:
    """Trains a network on one rank, and on two in each mode."""
    network = NETWORKS[name]
    alone = train(network.file, folder, 1, "datapar", epochs)
    errors: dict[str, float] = {"one rank": alone[-1][ERROR]}
    differences: list[float] = []
    for mode in modes:
        rows = train(network.file, folder, RANKS, mode, epochs)
        errors[mode] = rows[-1][ERROR]
        pairs = [(one[LOSS], other[LOSS]) for one, other in zip(alone, rows, strict=True)]
        differences += [abs(one - other) / abs(one) for one, other in pairs]
    return Result(network, epochs, errors, max(differences, default=None))


def train(file: str, folder: Path | None, ranks: int, mode: str, epochs: int) -> Rows:
    """Trains the network of a file, and returns the log of each epoch."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        command = [Path(sys.executable).parent / "torchmn", "train", FILES / f"{file}.yaml", "-n", ranks, f"--{mode}"]
        command += ["--data", folder] if folder is not None else []
        command += ["--out", out, "--epochs", epochs, "--set", "dtype=float64", "--set", "keep=1"]
        began = time.monotonic()
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"neon-results: training on {ranks} ranks failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    rows, seconds = [line for line in lines if "epoch" in line], time.monotonic() - began
    for row in rows:
        print(f"{file}, {ranks} x {mode}, epoch {row['epoch']}: test error {row[ERROR]:.2f} %")
    print(f"{epochs} epochs in {seconds:.0f} s", flush=True)
    return rows


def updated_page(text: str, results: dict[str, Result]) -> str:
    """Returns the page with the rows of these networks in its table; rows of other networks are kept."""
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"neon-results: {PAGE} has no {BEGIN} and {END}")
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines() if line.startswith("| ")}
    rows = {name: results[name].row(name) if name in results else kept.get(name) for name in NETWORKS}
    table = "\n".join([HEADER, *(row for row in rows.values() if row is not None)])
    made = f"Last change {datetime.date.today()}, torch {torch.__version__}, {os.cpu_count()} cores, float64."
    return f"{before}{BEGIN}\n{table}\n\n{made}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
