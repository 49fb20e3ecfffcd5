"""`torchmn evaluate`: prints loss and metrics of a trained experiment."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from torchmn.cli.experiment.command import run_command
from torchmn.cli.experiment.options import add_modes, add_ranks, add_run, add_values, resolve_run
from torchmn.cli.parser import Parser

if TYPE_CHECKING:
    from torchmn import Communicator
    from torchmn.experiment import Experiment

EXPLANATION = """\
Metrics are computed over the whole split and are the same at any number of ranks and in any mode.
--json prints them as one line of JSON, for scripts.

DIR/experiment.yaml is the file that was trained. To use another one, for instance with other metrics: FILE
--checkpoint DIR. The Python code that `imports:` and `module:` of this file name is executed: use only runs that you
trust.
"""


def main(arguments: Sequence[str]) -> int:
    """Evaluates the experiment; returns the exit status."""
    return run_command(command_parser(), "evaluate", arguments, _evaluate, resolve=resolve_run)


def command_parser() -> Parser:
    """Returns the parser of the command's options."""
    parser = Parser("torchmn evaluate", "Prints loss and metrics of the trained experiment in DIR.", EXPLANATION)
    parser.usage = "torchmn evaluate DIR [--split SPLIT] [--data DIR] [-n N] [--json]"
    add_run(parser)
    add_ranks(parser)
    add_modes(parser)
    add_values(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser


def _evaluate(options: argparse.Namespace, experiment: Experiment, comm: Communicator) -> int:
    from torchmn.experiment.run.evaluation import evaluate
    from torchmn.experiment.train import open_trained

    session, step = open_trained(experiment, comm, options.checkpoint, options.split, options.data)
    values = evaluate(session, options.split)
    if comm.rank == 0:
        if options.json:
            # JSON has no NaN; as in log.jsonl it is written as a string.
            numbers = {name: value if isfinite(value) else str(value) for name, value in values.items()}
            print(json.dumps({"split": options.split, "step": step, **numbers}))
        else:
            print(f"{session.splits[options.split].name}, after step {step}")
            width = max(20, *map(len, values))
            for name, value in values.items():
                measure = session.measures.get(name)
                print(f"  {name:{width}} {value:{'.2%' if measure is not None and measure.percent else '.6g'}}")
    return 0
