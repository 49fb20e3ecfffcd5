"""What the commands on experiment files have in common: read, check, start ranks, and say what is wrong in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmn.cli.commands.experiment_options import overrides, parallel_overrides
from torchmn.cli.commands.experiment_ranks import note_idle_modes, started_elsewhere
from torchmn.cli.parser import Parser, speaks
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
) -> int:
    """The exit status of `body` with the options and the experiment: on this rank, or on ranks that are started."""
    options = parser.parse(arguments)
    if options.file.endswith(".py"):
        parser.error(f"{options.file} is a script, no experiment. It is started by: torchmn run -n N {options.file}")
    try:
        ranks = default_ranks if options.n is None else options.n
        status = started_elsewhere(parser, name, arguments, options, ranks, lambda: check(options, ranks, checks_mode))
        if status is not None:
            return status
        return _on_this_rank(options, body)
    except ExperimentError as error:
        if speaks():
            print(error, file=sys.stderr)
        return 2


def _on_this_rank(options: argparse.Namespace, body: Body) -> int:
    """The exit status of `body` on this rank of those that are there, after all of them have read the same file."""
    from torchmn import create_communicator
    from torchmn.experiment.run.agreement import on_every_rank
    from torchmn.experiment.run.parallel import LOST
    from torchmn.experiment.vocabulary.load import plain

    with create_communicator() as comm:
        try:
            experiment = on_every_rank(comm, "experiment", lambda: experiment_of(options), plain)
            if comm.rank == 0:
                explain(options)
                note_idle_modes(options)
            return body(options, experiment, comm)
        except TorchMNError as error:
            if comm.size == 1 or isinstance(error, LOST) or _all_know(comm):
                raise
            print(f"rank {comm.rank} of {comm.size}: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from error


def _all_know(comm: Communicator) -> bool:
    """Whether all ranks ended with an error; False where others were in the middle of something, and now end too."""
    try:
        comm.barrier()
    except TorchMNError:
        return False
    return True


def experiment_of(options: argparse.Namespace) -> Experiment:
    """The experiment in the file, with what the flags say."""
    from torchmn.experiment import load

    return load(options.file, [*overrides(options), *parallel_overrides(options)])


def explain(options: argparse.Namespace) -> None:
    """Say what a neon file means today, with what the flags say, and what in it has no meaning any more."""
    from torchmn.experiment.file import overrides as overriding
    from torchmn.experiment.file.document import read_text
    from torchmn.experiment.file.writing import as_yaml
    from torchmn.experiment.vocabulary.load import parse

    file = options.file
    parsed = parse(file, read_text(Path(file)))
    if parsed.is_neon:
        overriding.apply(parsed.document, overrides(options))
        for note in parsed.notes:
            print(note, file=sys.stderr)
        print(f"{file} is a neon experiment; today it means (torchmn convert {file} writes it):\n")
        print("".join(f"    {line}\n" for line in as_yaml(parsed.document.values).splitlines()), flush=True)


def check(options: argparse.Namespace, size: int, checks_mode: bool) -> None:
    """Raise what is wrong in the file and in the mode, before there are ranks; these read the data and build the model.

    What only the data and the model show, every rank finds, and rank 0 prints it.
    """
    from torchmn.experiment.run.grids import check as check_mode

    experiment = experiment_of(options)
    if checks_mode:
        check_mode(experiment, size, experiment.the_dataset().known_shape(options.data))
