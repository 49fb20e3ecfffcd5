"""`torchmn train`: an experiment file in, a trained model out; on one rank or many, with the same numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchmn.cli.commands.experiment_command import run_command
from torchmn.cli.commands.experiment_options import add_file, add_modes, add_ranks, add_values, command_of
from torchmn.cli.commands.experiment_ranks import started_by
from torchmn.cli.parser import Parser
from torchmn.modes import BASIC_MODES

if TYPE_CHECKING:
    from torchmn import Communicator
    from torchmn.experiment import Experiment

EXPLANATION = """\
The same file runs on one rank and on many; nothing in it changes. Under mpiexec, srun or torchrun the ranks that
are there are used; -n starts ranks on this machine. Without a mode, neither in the file nor as a flag, ranks divide
the samples (--datapar).

--out gets log.jsonl, checkpoints, the resolved experiment and report.html; without it, a new directory under runs/.
Ctrl-C or SIGTERM saves a checkpoint; --resume goes on exactly from there, at any number of ranks.

FILE's `imports:` and `module:` run the Python code that they name: train files that you trust.

`torchmn new mnist-cnn` writes a file to start from. Files of neon 0.x are read as they are.
"""


def main(arguments: Sequence[str]) -> int:
    """The exit status of a training."""
    return run_command(_parser(), "train", arguments, _train)


def _parser() -> Parser:
    parser = Parser("torchmn train", "Trains the experiment in FILE.", EXPLANATION)
    parser.usage = (
        f"torchmn train FILE [-n N] [{'|'.join(mode.flag for mode in BASIC_MODES.values())}] [--grid HxW]\n"
        "                     [--data DIR] [--out DIR] [--resume] [--sample 10%%] [--set KEY=VALUE ...]"
    )
    add_file(parser)
    add_ranks(parser)
    add_modes(parser)
    add_values(parser)
    parser.add_argument("--epochs", metavar="E", help="another number of epochs")
    parser.add_argument("-o", "--out", metavar="DIR", help="where log, checkpoints and report go")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("-s", "--profile", action="store_true", help="say at the end where each rank's time went")
    return parser


def _train(options: argparse.Namespace, experiment: Experiment, comm: Communicator) -> int:
    from torchmn.experiment.interruption import interruption
    from torchmn.experiment.train import Request, train

    with interruption() as stop:
        request = Request(
            options.file,
            options.data,
            options.out,
            options.resume,
            stop,
            profile=options.profile,
            go_on=started_by(options) + command_of("train", options),
        )
        outcome = train(experiment, comm, request)
    return 0 if outcome.finished else 128 + (stop.signum or 2)
