"""run_command: the frame of commands on experiment files. Reads and checks the file, starts ranks, reports errors."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmn.cli.experiment.options import overrides, parallel_overrides
from torchmn.cli.experiment.ranks import run_on_new_ranks, warn_unused_modes
from torchmn.cli.help_layout import fitted
from torchmn.cli.parser import Parser, is_rank_0
from torchmn.errors import ExperimentError, TorchMNError

if TYPE_CHECKING:
    from torchmn import Communicator
    from torchmn.experiment import Experiment

Body = Callable[[argparse.Namespace, "Experiment", "Communicator"], int]


def run_command(
    parser: Parser,
    name: str,
    arguments: Sequence[str],
    body: Body,
    *,
    default_ranks: int = 1,
    checks_mode: bool = True,
    resolve: Callable[[Parser, argparse.Namespace], None] = lambda parser, options: None,
) -> int:
    """Runs `body` on this rank, or starts ranks that do.

    Args:
        parser: of the command's options.
        name: of the command.
        arguments: its command line.
        body: called with the options, the experiment and the communicator; returns an exit status.
        default_ranks: number of ranks without -n.
        checks_mode: whether the mode must fit the number of ranks.
        resolve: completes the options.

    Returns:
        The exit status.
    """
    options = parser.parse(arguments)
    empty = next((name for name in ("file", "out", "checkpoint", "data") if getattr(options, name, None) == ""), None)
    if empty is not None:  # as of a variable of the shell that is not set
        parser.error(f"{'FILE' if empty == 'file' else f'--{empty}'} is empty.")
    resolve(parser, options)
    if Path(options.file).is_dir():
        parser.error(_directory_advice(parser, options.file))
    if options.file.endswith(".py"):
        parser.error(f"{options.file} is a script, not an experiment. To start it: torchmn run -n N {options.file}")
    try:
        ranks = default_ranks if options.n is None else options.n
        status = run_on_new_ranks(parser, name, arguments, options, ranks, lambda: check(options, ranks, checks_mode))
        if status is not None:
            return status
        return _on_this_rank(options, body)
    except ExperimentError as error:
        if is_rank_0():
            print(fitted(str(error), sys.stderr), file=sys.stderr)
        return 2


def _directory_advice(parser: Parser, directory: str) -> str:
    """Returns what to do instead of giving a directory where an experiment file is expected."""
    file = Path(directory) / "experiment.yaml"
    if not file.is_file():
        return f"{directory} is a directory, not an experiment file."
    command = shlex.join([*parser.prog.split(), str(file)])
    resume = f" --resume --out {shlex.quote(directory)}" if parser.prog.endswith("train") else ""
    return f"{directory} is the directory of a run. To use its experiment: {command}{resume}"


def _on_this_rank(options: argparse.Namespace, body: Body) -> int:
    """Runs `body` on this rank, after all ranks have read the same file; returns its exit status."""
    from torchmn import create_communicator
    from torchmn.experiment.run.agreement import on_every_rank
    from torchmn.experiment.run.parallel import FATAL_ERRORS
    from torchmn.experiment.vocabulary.load import plain

    with create_communicator() as comm:
        try:
            experiment = on_every_rank(comm, "experiment", lambda: experiment_of(options), plain)
            if comm.rank == 0:
                print_conversion(options)
                warn_unused_modes(options)
            return body(options, experiment, comm)
        except TorchMNError as error:
            if comm.size == 1 or isinstance(error, FATAL_ERRORS) or _all_failed(comm):
                raise
            print(f"rank {comm.rank} of {comm.size}: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from error


def _all_failed(comm: Communicator) -> bool:
    """Returns whether all ranks raised an error; if not, the ranks inside another operation raise one now."""
    try:
        comm.barrier()
    except TorchMNError:
        return False
    return True


def experiment_of(options: argparse.Namespace) -> Experiment:
    """Returns the experiment in the file, with the values of the command line."""
    from torchmn.experiment import load

    return load(options.file, [*overrides(options), *parallel_overrides(options)])


def print_conversion(options: argparse.Namespace) -> None:
    """For a neon file, prints the TorchMN experiment that it is converted to, and the keys without effect."""
    from torchmn.experiment.file.document import read_text
    from torchmn.experiment.file.overrides import apply
    from torchmn.experiment.file.writing import as_yaml
    from torchmn.experiment.vocabulary.load import parse

    file = options.file
    parsed = parse(file, read_text(Path(file)))
    if parsed.is_neon:
        apply(parsed.document, overrides(options))
        if is_quiet(options):
            return
        for note in parsed.notes:
            print(fitted(note, sys.stderr), file=sys.stderr)
        print(f"{file} is a neon experiment, converted to (see `torchmn convert {file}`):\n")
        print("".join(f"    {line}\n" for line in as_yaml(parsed.document.values).splitlines()), flush=True)


def is_quiet(options: argparse.Namespace) -> bool:
    """Returns whether standard output is reserved for JSON, or only errors are printed."""
    return getattr(options, "quiet", False) or getattr(options, "json", False)


def check(options: argparse.Namespace, size: int, checks_mode: bool) -> None:
    """Raises an ExperimentError if the file is wrong, or the mode does not fit `size` ranks.

    It runs before any rank is started, and neither reads the data nor builds the model: the ranks do, and rank 0
    prints errors found there.
    """
    from torchmn.experiment.run.grids import check as check_mode

    experiment = experiment_of(options)
    if checks_mode:
        check_mode(experiment, size, experiment.dataset.known_shape(options.data))
