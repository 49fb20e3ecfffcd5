"""`torchmn predict`: writes the outputs of a trained experiment for each sample."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmn.cli.experiment.command import run_command
from torchmn.cli.experiment.options import add_modes, add_ranks, add_run, add_values, resolve_run
from torchmn.cli.parser import Parser
from torchmn.errors import ExperimentError

if TYPE_CHECKING:
    from torchmn import Communicator
    from torchmn.experiment import Experiment

EXPLANATION = """\
Writes an .npz file with `outputs` (one row per sample, in the order of the data set), `predicted` (the class with the
largest output; -1 if an output is NaN) and `targets`.

DIR/experiment.yaml is the file that was trained. To use another one, for instance with other metrics: FILE
--checkpoint DIR. The Python code that `imports:` and `module:` of this file name is executed: use only runs that you
trust.
"""


def main(arguments: Sequence[str]) -> int:
    """Writes the predictions; returns the exit status."""
    return run_command(command_parser(), "predict", arguments, _predict, resolve=resolve_run)


def command_parser() -> Parser:
    """Returns the parser of the command's options."""
    parser = Parser("torchmn predict", "Writes the outputs of the trained experiment in DIR.", EXPLANATION)
    parser.usage = "torchmn predict DIR [--split SPLIT] [--data DIR] [--out FILE.npz] [-n N]"
    add_run(parser)
    add_ranks(parser)
    add_modes(parser)
    add_values(parser)
    parser.add_argument("-o", "--out", metavar="FILE.npz", help="file to write; default: in the run's directory")
    return parser


def _predict(options: argparse.Namespace, experiment: Experiment, comm: Communicator) -> int:
    from torchmn.experiment.run.agreement import on_rank_0
    from torchmn.experiment.train import open_trained, write_predictions

    path = on_rank_0(comm, "predict", lambda: _output_path(options))
    session, step = open_trained(experiment, comm, options.checkpoint, options.split, options.data)
    write_predictions(session, options.split, path)
    if comm.rank == 0:
        print(f"{len(session.splits[options.split])} predictions after step {step}: {path}")
    return 0


def _output_path(options: argparse.Namespace) -> str:
    """Returns the file for the predictions; raises an ExperimentError if it cannot be written."""
    from torchmn.experiment.run.run_directory import run_directory_of

    if options.out is None:
        return str(run_directory_of(options.checkpoint).path / f"predictions-{options.split}.npz")
    path = Path(os.path.expanduser(options.out))
    if path.suffix != ".npz":  # numpy would append it silently
        path = path.with_name(f"{path.name}.npz")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ExperimentError(f"--out {options.out}: cannot be written; is {path.parent.resolve()} a directory?")
    return str(path)
