"""neon's MLP 784-512-10 on the full MNIST, on one rank and on two: its test error, and whether both are equal.

    make neon-results                  # MNIST=DIR if the files are not in ~/.cache/torchmn/mnist

Prints the test error of each epoch. The exit status is 1 if the last one exceeds the bound, or if two ranks do not give
the numbers of one. Trains in float64: in float32, rounding differences grow until an image is classified differently.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torchmn.datasets import DatasetError, mnist
from torchmn.datasets.load_mnist import default_root

FILE = Path(__file__).parent / "neon" / "mnist_mlp-784-512-10.yaml"
RANKS = (1, 2)
ERROR, LOSS = "test misclassified_percentage", "test loss"
TOLERANCE = 1e-9
"""Largest relative difference between the losses of one rank and of two."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=None, help="directory of the MNIST files")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--bound", type=float, default=2.3, help="the largest test error, in percent, after all epochs")
    options = parser.parse_args()
    folder = (options.data or default_root()).expanduser()
    folder = folder / "mnist" if (folder / "mnist").is_dir() else folder
    problem = data_problem(folder)
    if problem:
        print(
            f"neon-results: the full MNIST is not in {folder}: {problem}\n"
            "Pass its directory: make neon-results MNIST=DIR. Or download it:\n"
            'python -c \'from torchmn.datasets import mnist; [mnist(s, download=True) for s in ("train", "test")]\'',
            file=sys.stderr,
        )
        return 2
    runs = {ranks: train(folder, ranks, options.epochs) for ranks in RANKS}
    return report(runs, options.bound)


def data_problem(folder: Path) -> str | None:
    """Why the folder does not hold the full MNIST; None if it does."""
    try:
        found = [len(mnist(split, folder)) for split in ("train", "test")]
    except DatasetError as error:
        return str(error)
    return None if found == [60000, 10000] else f"expected 60000 and 10000 images, got {found[0]} and {found[1]}"


def train(folder: Path, ranks: int, epochs: int) -> list[dict[str, float]]:
    """The log of each epoch, from training on that many ranks."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        command = [Path(sys.executable).parent / "torchmn", "train", FILE, "-n", ranks, "--datapar", "--data", folder]
        command += ["--out", out, "--epochs", epochs, "--set", "dtype=float64", "--set", "keep=1"]
        began = time.monotonic()
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"neon-results: training on {ranks} ranks failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    rows, seconds = [line for line in lines if "epoch" in line], time.monotonic() - began
    error = f"test error {rows[-1][ERROR]:.2f} %"
    print(f"{ranks} rank{'s' * (ranks > 1)}: {epochs} epochs in {seconds:.0f} s, {error}", flush=True)
    return rows


def report(runs: dict[int, list[dict[str, float]]], bound: float) -> int:
    """Print all test errors and whether the checks passed; returns the exit status."""
    print(f"\n{'epoch':>5}" + "".join(f"{f'{ranks} rank' + 's' * (ranks > 1):>11}" for ranks in runs) + "   test error")
    rows = list(zip(*runs.values(), strict=True))
    for row in rows:
        print(f"{row[0]['epoch']:>5}" + "".join(f"{numbers[ERROR]:>9.2f} %" for numbers in row))
    difference = max(abs(one[LOSS] - other[LOSS]) / abs(one[LOSS]) for one, other in rows)
    same = difference <= TOLERANCE and all(one[ERROR] == other[ERROR] for one, other in rows)
    reached = max(numbers[ERROR] for numbers in rows[-1])
    print(f"\ntest error {reached:.2f} %, expected at most {bound} %: {'passed' if reached <= bound else 'FAILED'}")
    print(f"relative difference of test losses between {RANKS[0]} and {RANKS[1]} ranks {difference:.1e}, "
          f"expected at most {TOLERANCE:.0e}, and equal test errors: {'passed' if same else 'FAILED'}")  # fmt: skip
    return 0 if same and reached <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
