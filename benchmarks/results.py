"""The results of one benchmark script, as a table of ratios and as JSON.

A case (one size, one model) has contenders, and each contender has a list of values, one per turn. The first contender
is the reference. Contenders whose names begin with "TorchMN" run this library.

Cases of growing work form a series. For each contender, the exponent of a series is the slope of its values over the
work, both as logarithms: 1 if the cost is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, NamedTuple

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


class Work(NamedTuple):
    """The place of a case in a series: `amount` in units of the series, such as 1,000 tensors."""

    series: str
    amount: float


class Results:
    """The values of all contenders in all cases.

    Args:
        subject: header of the first column: what the cases are.
        unit: "s" for seconds, or "MB".
    """

    def __init__(self, subject: str, unit: str = "s"):
        self.subject, self.unit = subject, unit
        self.cases: dict[str, dict[str, list[float]]] = {}
        self.work: dict[str, Work] = {}
        self.counts: dict[str, dict[str, int]] = {}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Results:
        """The results that `finish` wrote."""
        results = cls(content["subject"], content["unit"])
        results.cases = content["cases"]
        results.work = {case: Work(*work) for case, work in content.get("work", {}).items()}
        results.counts = content.get("counts", {})
        return results

    def add(self, case: str, values: Mapping[str, Sequence[float]], work: Work | None = None) -> None:
        """Add one case; the first contender is the reference. With `work`, it belongs to a series."""
        self.cases[case] = {name: [float(f"{value:.4g}") for value in turns] for name, turns in values.items()}
        if work is not None:
            self.work[case] = work

    def count(self, case: str, counts: Mapping[str, int]) -> None:
        """Add numbers of a case that do not depend on the machine, such as messages."""
        self.counts[case] = dict(counts)

    def series(self) -> dict[str, list[str]]:
        """The cases of each series, by the amount of work."""
        found: dict[str, list[str]] = {}
        for case in sorted(self.work, key=lambda case: self.work[case].amount):
            found.setdefault(self.work[case].series, []).append(case)
        return found

    def exponent(self, series: str, contender: str) -> float | None:
        """The slope of the contender's medians in a series; None if it has fewer than two."""
        cases = [case for case in self.series()[series] if contender in self.cases[case]]
        values = [median(self.cases[case][contender]) for case in cases]
        if len(cases) < 2 or min(values) <= 0:
            return None
        amounts = [math.log(self.work[case].amount) for case in cases]
        return linear_regression(amounts, [math.log(value) for value in values]).slope

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
        for series, its_cases in self.series().items():
            if any(case in cases for case in its_cases):
                found = [self.exponent(series, name) for name in names]
                texts = ["" if exponent is None else f"{exponent:.2f}" for exponent in found]
                rows.append([f"exponent, {series}", *texts])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

    def count_table(self) -> str:
        """A Markdown table of the counts; "" if there are none."""
        names = list(dict.fromkeys(name for counts in self.counts.values() for name in counts))
        rows = [[self.subject, *names], ["---", *["---:"] * len(names)]]
        rows += [[case, *(str(counts.get(name, "")) for name in names)] for case, counts in self.counts.items()]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in rows) if self.counts else ""

    def finish(self, options: argparse.Namespace) -> None:
        """Print the table, and write the JSON file if `--json` was given."""
        print(", ".join(environment()))
        print(
            f"{self.table()}\nTorchMN: median over turns. Other columns: divided by TorchMN in the same turn, median."
        )
        if self.counts:
            print(self.count_table())
        if options.json is not None:
            import torchmn

            cases = self.cases
            if options.ours_only:
                cases = {
                    case: {name: turns for name, turns in contenders.items() if name.startswith("TorchMN")}
                    for case, contenders in cases.items()
                }
            content = {"library": torchmn.__file__, "environment": environment(), "subject": self.subject}
            content |= {"unit": self.unit, "cases": cases, "work": self.work, "counts": self.counts}
            options.json.write_text(json.dumps(content))


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
