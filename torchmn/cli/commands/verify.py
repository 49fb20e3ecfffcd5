"""`torchmn verify`: does an experiment give the same numbers in every mode? See for yourself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchmn.cli.commands.experiment_command import run_command
from torchmn.cli.commands.experiment_options import add_file, add_ranks, add_values
from torchmn.cli.parser import Parser, at_least
from torchmn.errors import ExperimentError

if TYPE_CHECKING:
    from torchmn import Communicator
    from torchmn.experiment import Experiment
    from torchmn.experiment.verification import Row

EXPLANATION = """\
Trains a few steps on one rank, then the same steps in every mode and grid that N ranks can form, and shows how far
apart they are: the loss of every step and, after the last, outputs, gradients and weights; each relative to the
largest number of its kind. It computes in float64, where rounding stays far below 1e-9 and a mistake does not;
--float32 in single precision, up to 1e-4.

The exit status is 0 if all are the same, and 1 if one is not.
"""
DEFAULT_RANKS = 4
WIDTH = 120
"""More than the table of the longest mode and grid needs."""


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 if every mode gives the numbers of one rank."""
    parser = Parser("torchmn verify", "Compares every mode of FILE's experiment with one rank.", EXPLANATION)
    parser.usage = "torchmn verify FILE [-n N] [--steps S] [--float32] [--data DIR] [--sample 10%%]"
    add_file(parser)
    add_ranks(parser)
    add_values(parser)
    parser.add_argument("--steps", metavar="S", type=at_least(1), default=3, help="how many steps; 3 if not said")
    parser.add_argument("--float32", action="store_true", help="compute in single precision")
    return run_command(parser, "verify", arguments, _verify, default_ranks=DEFAULT_RANKS, checks_mode=False)


def _verify(options: argparse.Namespace, experiment: Experiment, comm: Communicator) -> int:
    from rich.console import Console
    from rich.table import Table

    from torchmn.experiment.verification import LARGEST, QUANTITIES, verify

    if comm.size == 1:
        raise ExperimentError("verify compares one rank with several: say -n 2 or more")
    experiment = experiment.model_copy(update={"dtype": "float32" if options.float32 else "float64"})
    console = Console(quiet=comm.rank != 0, highlight=False)
    console.print(
        f"{options.file}: {options.steps} steps on one rank, and on {comm.size} in every mode that fits "
        f"({experiment.dtype})\n",
        soft_wrap=True,
    )
    rows: list[Row] = []
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mode", no_wrap=True)
    table.add_column("grid", no_wrap=True)
    for quantity in QUANTITIES:
        table.add_column(quantity, justify="right")
    table.add_column("")
    for row in verify(experiment, comm, options.steps, options.data):
        rows.append(row)
        console.print(f"[dim]{row.mode}, {row.grid} done[/dim]") if console.is_terminal else None
        table.add_row(row.mode, row.grid, *_cells(row))
    # In a narrow terminal lines are broken: rich would leave out the columns that count.
    Console(quiet=comm.rank != 0, highlight=False, width=max(console.width, WIDTH)).print(table)
    return _conclude(console, rows, LARGEST[experiment.dtype])


def _cells(row: Row) -> list[str]:
    from torchmn.experiment.verification import QUANTITIES

    if row.refusal:
        return ["-"] * len(QUANTITIES) + ["[yellow]not possible[/yellow]"]
    numbers = [f"{row.deviations[quantity]:.1e}" if row.deviations[quantity] else "0" for quantity in QUANTITIES]
    return [*numbers, "[green]same[/green]" if row.passed else "[bold red]DIFFERENT[/bold red]"]


def _conclude(console, rows: list[Row], largest: float) -> int:
    console.print()
    for row in rows:
        if row.refusal:
            console.print(f"{row.mode}, {row.grid}: {row.refusal}", soft_wrap=True, markup=False)
    tried = [row for row in rows if not row.refusal]
    wrong = [row for row in tried if not row.passed]
    if not tried:
        console.print("No mode fits this experiment.")
        return 1
    if wrong:
        named = "; ".join(f"{row.mode}, {row.grid}" for row in wrong)
        console.print(
            f"[bold red]Not the same numbers[/bold red] (more than {largest:g} apart): {named}", soft_wrap=True
        )
        return 1
    largest_seen = max(max(row.deviations.values()) for row in tried)
    console.print(
        f"[green]{len(tried)} ways to run it, the same numbers[/green]: nothing is more than {largest_seen:.1e} apart "
        f"(allowed: {largest:g}).",
        soft_wrap=True,
    )
    return 0
