"""`torchmn verify`: compares the numbers of an experiment in every mode with those on one rank."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchmn.cli.experiment.command import run_command
from torchmn.cli.experiment.options import add_file, add_ranks, add_values
from torchmn.cli.parser import Parser, at_least
from torchmn.errors import ExperimentError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from torchmn import Communicator
    from torchmn.experiment import Experiment
    from torchmn.experiment.verification import ModeResult

EXPLANATION = """\
Trains a few steps on one rank, then the same steps in every mode and grid that N ranks can form, and prints the
largest differences: of the loss of every step and, after the last step, of outputs, gradients and weights, each
relative to the largest value of its kind. It computes in float64, where rounding stays far below the tolerance of
1e-9; with --float32 the tolerance is 1e-4.

exit status: 0 if all modes give the same numbers, otherwise 1.
"""
DEFAULT_RANKS = 4
LEAST_WIDTH = 72
"""Columns of the table: enough for the numbers, and for the words of the longest mode and grid below each other."""


def main(arguments: Sequence[str]) -> int:
    """Compares the modes; returns 0 if all of them give the numbers of one rank, otherwise 1."""
    return run_command(command_parser(), "verify", arguments, _verify, default_ranks=DEFAULT_RANKS, checks_mode=False)


def command_parser() -> Parser:
    """Returns the parser of the command's options."""
    parser = Parser("torchmn verify", "Compares every mode of the experiment in FILE with one rank.", EXPLANATION)
    parser.usage = "torchmn verify FILE [-n N] [--steps S] [--float32] [--data DIR] [--sample 10%%]"
    add_file(parser)
    add_ranks(parser)
    add_values(parser)
    parser.add_argument("--steps", metavar="S", type=at_least(1), default=3, help="number of steps; default: 3")
    parser.add_argument("--float32", action="store_true", help="compute in single precision")
    return parser


def _verify(options: argparse.Namespace, experiment: Experiment, comm: Communicator) -> int:
    from rich.console import Console

    from torchmn.experiment.verification import TOLERANCES, verify

    if comm.size == 1:
        raise ExperimentError("verify compares one rank with several: use -n 2 or more")
    experiment = experiment.model_copy(update={"dtype": "float32" if options.float32 else "float64"})
    console = Console(quiet=comm.rank != 0, highlight=False)
    console.print(
        f"{options.file}: {options.steps} steps in {experiment.dtype} on one rank, and on {comm.size} ranks in every "
        "mode that fits\n",
        soft_wrap=not console.is_terminal,
    )
    rows: list[ModeResult] = []
    for row in verify(experiment, comm, options.steps, options.data):
        rows.append(row)
        if console.is_terminal:
            console.print(f"[dim]{row.mode}, {row.grid} done[/dim]")
    # In a narrower terminal rich would shorten the numbers; broken lines are better.
    Console(quiet=comm.rank != 0, highlight=False, width=max(console.width, LEAST_WIDTH)).print(verify_table(rows))
    return _conclude(console, rows, TOLERANCES[experiment.dtype])


def verify_table(rows: Sequence[ModeResult]) -> Table:
    """Returns the table of all modes and grids."""
    from rich.table import Table

    from torchmn.experiment.verification import QUANTITIES

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mode", no_wrap=True)
    table.add_column("grid")  # its words may be on separate lines
    for quantity in QUANTITIES:
        table.add_column(quantity, justify="right", no_wrap=True)
    table.add_column("", min_width=len("DIFFERENT"))
    for row in rows:
        table.add_row(row.mode, row.grid, *_cells(row))
    return table


def _cells(row: ModeResult) -> list[str]:
    from torchmn.experiment.verification import QUANTITIES

    if row.refusal:
        return ["-"] * len(QUANTITIES) + ["[yellow]not possible[/yellow]"]
    numbers = [f"{row.deviations[quantity]:.1e}" if row.deviations[quantity] else "0" for quantity in QUANTITIES]
    return [*numbers, "[green]same[/green]" if row.passed else "[bold red]DIFFERENT[/bold red]"]


def _conclude(console: Console, rows: list[ModeResult], tolerance: float) -> int:
    console.print()
    for row in rows:
        if row.refusal:
            console.print(f"{row.mode}, {row.grid}: {row.refusal}", soft_wrap=not console.is_terminal, markup=False)
    tried = [row for row in rows if not row.refusal]
    wrong = [row for row in tried if not row.passed]
    if not tried:
        console.print("No mode is possible for this experiment.")
        return 1
    if wrong:
        named = "; ".join(f"{row.mode}, {row.grid}" for row in wrong)
        console.print(
            f"[bold red]Different numbers[/bold red] (by more than {tolerance:g}): {named}",
            soft_wrap=not console.is_terminal,
        )
        return 1
    largest = max(max(row.deviations.values()) for row in tried)
    console.print(
        f"[green]Same numbers in {len(tried)} configurations[/green]: the largest difference is {largest:.1e} "
        f"(tolerance: {tolerance:g}).",
        soft_wrap=not console.is_terminal,
    )
    return 0
