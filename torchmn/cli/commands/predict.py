"""`torchmn predict`: what a trained experiment gives for each sample."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmn.cli.commands.experiment_command import run_command
from torchmn.cli.commands.experiment_options import add_file, add_modes, add_ranks, add_trained, add_values
from torchmn.cli.parser import Parser
from torchmn.errors import ExperimentError

if TYPE_CHECKING:
    from torchmn import Communicator
    from torchmn.experiment import Experiment

EXPLANATION = """\
Writes an .npz file with `outputs` (one row for each sample, in the order of the data), `predicted` (the best class of
each; -1 where an output is NaN) and `targets`.

FILE is the file that was trained, or DIR/experiment.yaml. Its `imports:` and `module:` run the Python code that they
name; those of a file in DIR are not run, unless it is FILE.
"""


def main(arguments: Sequence[str]) -> int:
    """The exit status of a prediction."""
    parser = Parser("torchmn predict", "Outputs of FILE's experiment, trained.", EXPLANATION)
    parser.usage = "torchmn predict FILE --checkpoint DIR [--split SPLIT] [--data DIR] [--out FILE.npz] [-n N]"
    add_file(parser)
    add_trained(parser)
    add_ranks(parser)
    add_modes(parser)
    add_values(parser)
    parser.add_argument("-o", "--out", metavar="FILE.npz", help="where to write; by default beside the checkpoints")
    return run_command(parser, "predict", arguments, _predict)


def _predict(options: argparse.Namespace, experiment: Experiment, comm: Communicator) -> int:
    from torchmn.experiment.run.agreement import on_rank_0
    from torchmn.experiment.train import open_trained, write_predictions

    path = on_rank_0(comm, "predict", lambda: _file(options))
    session, step = open_trained(experiment, comm, options.checkpoint, options.split, options.data)
    write_predictions(session, options.split, path)
    if comm.rank == 0:
        print(f"{len(session.splits[options.split])} predictions after step {step}: {path}")
    return 0


def _file(options: argparse.Namespace) -> str:
    """Where the predictions go; an ExperimentError where that can not be, before anything is computed."""
    from torchmn.experiment.run.run_directory import run_of

    if options.out is None:
        return str(run_of(options.checkpoint).path / f"predictions-{options.split}.npz")
    path = Path(options.out).expanduser()
    if path.suffix != ".npz":  # numpy would add it, without a word
        path = path.with_name(f"{path.name}.npz")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ExperimentError(f"--out {options.out}: can not be written; is {path.parent.resolve()} a directory?")
    return str(path)
