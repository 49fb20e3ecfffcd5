"""`torchmn train`: trains the experiment in a YAML file, on one rank or many, with the same numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchmn.cli.commands.experiment_command import run_command
from torchmn.cli.commands.experiment_options import add_file, add_modes, add_ranks, add_values, command_line
from torchmn.cli.commands.experiment_ranks import launcher_prefix
from torchmn.cli.parser import Parser
from torchmn.modes import BASIC_MODES

if TYPE_CHECKING:
    from torchmn import Communicator
    from torchmn.experiment import Experiment

EXPLANATION = """\
The same file runs on one rank and on many without changes. Under mpiexec, srun or torchrun, their ranks are used;
-n starts ranks on this machine. If neither the file nor a flag selects a mode, ranks divide the samples (--datapar).

The directory --out receives log.jsonl, checkpoints, the resolved experiment and report.html; the default is a new
directory under runs/. Ctrl-C or SIGTERM saves a checkpoint; --resume continues exactly from there, at any number of
ranks.

The Python code that `imports:` and `module:` of FILE name is executed: train only files that you trust.

`torchmn new mnist-cnn` writes an example. Experiment files of neon 0.x are read directly.
"""


def main(arguments: Sequence[str]) -> int:
    """Trains the experiment; returns the exit status."""
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
    parser.add_argument("--epochs", metavar="E", help="number of epochs, instead of the one in FILE")
    parser.add_argument("-o", "--out", metavar="DIR", help="directory for log, checkpoints and report")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("-s", "--profile", action="store_true", help="print at the end how each rank spent its time")
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
            resume_command=launcher_prefix(options) + command_line("train", options),
        )
        outcome = train(experiment, comm, request)
    return 0 if outcome.finished else 128 + (stop.signum or 2)
