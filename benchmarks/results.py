"""The results of one benchmark script, as a table of ratios and as JSON.

A case (one size, one model) has contenders, and each contender has a list of values, one per turn. The first contender
is the reference. Contenders whose names begin with "TorchMN" run this library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch


def arguments(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks.

    Args:
        description: the docstring of the script.
        rounds: default number of turns per contender.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns per contender (default {rounds})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--ours-only", action="store_true", help="one turn for other contenders; not in the JSON file")
    return parser


class Results:
    """The values of all contenders in all cases.

    Args:
        subject: header of the first column: what the cases are.
        unit: "s" for seconds, or "MB".
    """

    def __init__(self, subject: str, unit: str = "s"):
        self.subject, self.unit = subject, unit
        self.cases: dict[str, dict[str, list[float]]] = {}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Results:
        """The results that `finish` wrote."""
        results = cls(content["subject"], content["unit"])
        results.cases = content["cases"]
        return results

    def add(self, case: str, values: Mapping[str, Sequence[float]]) -> None:
        """Add one case; the first contender is the reference."""
        self.cases[case] = {name: [float(f"{value:.4g}") for value in turns] for name, turns in values.items()}

    def ratios(self, case: str, contender: str) -> list[float]:
        """The contender's value divided by that of the reference, for each turn that both have."""
        contenders = self.cases[case]
        reference = contenders[next(iter(contenders))]
        return [value / mine for value, mine in zip(contenders[contender], reference, strict=False)]

    def table(self, pattern: str = "") -> str:
        """A Markdown table: the reference's median value, and the median ratio of each other contender.

        Args:
            pattern: regular expression of the cases to show.
        """
        cases = {case: each for case, each in self.cases.items() if re.search(pattern, case)}
        names = list(dict.fromkeys(name for contenders in cases.values() for name in contenders))
        rows = [[self.subject, *names]]
        for case, contenders in cases.items():
            cells = [ratio_text(self.ratios(case, name)) if name in contenders else "" for name in names[1:]]
            rows.append([case, value_text(median(contenders[names[0]]), self.unit), *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

    def finish(self, options: argparse.Namespace) -> None:
        """Print the table, and write the JSON file if `--json` was given."""
        print(", ".join(environment()))
        print(
            f"{self.table()}\nTorchMN: median over turns. Other columns: divided by TorchMN in the same turn, median."
        )
        if options.json is not None:
            import torchmn

            cases = self.cases
            if options.ours_only:
                cases = {
                    case: {name: turns for name, turns in contenders.items() if name.startswith("TorchMN")}
                    for case, contenders in cases.items()
                }
            content = {"library": torchmn.__file__, "environment": environment(), "subject": self.subject}
            options.json.write_text(json.dumps({**content, "unit": self.unit, "cases": cases}))


def environment() -> list[str]:
    """Number of cores, and versions."""
    found = [f"{os.cpu_count()} cores", f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    mpi = sys.modules.get("mpi4py.MPI")  # an import here would start MPI
    if mpi is None:
        return found
    library = mpi.Get_library_version().splitlines()[0].replace("Version:", "")  # of MPICH: "MPICH Version: 5.0.2"
    return [*found, " ".join(library.split())]


def value_text(value: float, unit: str) -> str:
    """`25 us`, `3.07 ms`, `1.2 s`, `348 MB`."""
    if unit != "s":
        return f"{value:.0f} {unit}"
    scale, unit = (1e6, "us") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")
    return f"{value * scale:.{0 if value * scale >= 100 else 1 if value * scale >= 10 else 2}f} {unit}"


def ratio_text(ratios: Sequence[float]) -> str:
    """The median: `0.95`, `12.3`."""
    ratio = median(ratios)
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"
