"""`torchmn train`: an experiment file in, a trained model out; on one rank or many, with the same numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchmn.cli.experiment_options import (
    add_file,
    add_modes,
    add_ranks,
    add_values,
    overrides,
    parallel_overrides,
)
from torchmn.cli.experiment_ranks import speaks, started_elsewhere
from torchmn.cli.parser import Parser
from torchmn.errors import ExperimentError

EXPLANATION = """\
The same file runs on one rank and on many; nothing in it changes. Under mpiexec, srun or torchrun the ranks that
are there are used; -n starts ranks on this machine. Without a mode, neither in the file nor as a flag, ranks divide
the samples (--datapar).

--out gets log.jsonl, checkpoints, the resolved experiment and report.html; without it, a new directory under runs/.
Ctrl-C saves a checkpoint; --resume goes on exactly from there, at any number of ranks.

`torchmn new mnist-cnn` writes a file to start from. Files of neon 0.x are read as they are.
"""


def main(arguments: Sequence[str]) -> int:
    """The exit status of a training."""
    parser = _parser()
    options = parser.parse(arguments)
    try:
        experiment = None
        status = started_elsewhere(parser, "train", arguments, options, lambda size: _check(options, size))
        if status is not None:
            return status
        experiment = _experiment(options)
        return _train(options, experiment)
    except ExperimentError as error:
        if speaks():
            print(error, file=sys.stderr)
        return 2


def _parser() -> Parser:
    parser = Parser("torchmn train", "Trains the experiment in FILE.", EXPLANATION)
    parser.usage = (
        "torchmn train FILE [-n N] [--datapar|--modelpar|--halopar|--halodatapar] [--grid HxW]\n"
        "                     [--data DIR] [--out DIR] [--resume] [--sample 10%] [--set KEY=VALUE ...]"
    )
    add_file(parser)
    add_ranks(parser)
    add_modes(parser)
    add_values(parser)
    parser.add_argument("-o", "--out", metavar="DIR", help="where log, checkpoints and report go")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    return parser


def _experiment(options: argparse.Namespace):
    from torchmn.experiment import load

    return load(options.file, [*overrides(options), *parallel_overrides(options)])


def _check(options: argparse.Namespace, size: int) -> None:
    """Raise what would go wrong on every rank, before there are any."""
    from torchmn.experiment.model import build_model, load_data
    from torchmn.experiment.parallel import check

    experiment = _experiment(options)
    data = load_data(experiment, options.data)["train"]
    build_model(experiment, data)
    check(experiment, size, data.shape)


def _train(options: argparse.Namespace, experiment) -> int:
    from torchmn import create_communicator
    from torchmn.experiment.interruption import interruption
    from torchmn.experiment.run import Request, train

    with create_communicator() as comm, interruption() as stop:
        request = Request(options.file, options.data, options.out, options.resume, stop)
        outcome = train(experiment, comm, request)
    return 0 if outcome.finished else 128 + (stop.signum or 2)
