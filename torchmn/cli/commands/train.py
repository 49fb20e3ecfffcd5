"""`torchmn train`: trains the experiment in a YAML file, on one rank or many, with the same numbers."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from torchmn.cli.experiment.command import is_quiet, run_command
from torchmn.cli.experiment.options import add_file, add_modes, add_ranks, add_values, command_line
from torchmn.cli.experiment.ranks import launcher_prefix
from torchmn.cli.parser import Parser
from torchmn.modes import BASIC_MODES

if TYPE_CHECKING:
    from torchmn import Communicator
    from torchmn.experiment import Experiment
    from torchmn.experiment.dry_run import DryRun

EXPLANATION = """\
The same file runs on one rank and on many without changes. Under mpiexec, srun or torchrun, their ranks are used;
-n starts ranks on this machine. If neither the file nor a flag selects a mode, ranks divide the samples (--datapar).

The directory --out receives log.jsonl, checkpoints, the resolved experiment and report.html; the default is a new
directory under runs/. Ctrl-C, SIGTERM or SIGUSR1 saves a checkpoint; --resume continues exactly from there, at any
number of ranks. The exit status is then 130, 143 or 138.

--dry-run runs one step, prints the shapes of all layers and the memory of each rank, and writes nothing.
--quiet prints errors only. --json prints one line of JSON at the end: the directory of the run, whether it finished,
and loss and metrics of the last epoch.

The Python code that `imports:` and `module:` of FILE name is executed: train only files that you trust.

`torchmn new mnist-cnn` writes an example. Experiment files of neon 0.x are read directly.
"""


_SIZES = ("weights", "gradients", "optimizer", "activations", "process")
"""What a dry run reports of each rank."""


def main(arguments: Sequence[str]) -> int:
    """Trains the experiment; returns the exit status."""
    return run_command(command_parser(), "train", arguments, _train, resolve=_check)


def _check(parser: Parser, options: argparse.Namespace) -> None:
    if options.dry_run and options.resume:
        parser.error("--dry-run does not resume: it runs the first step. Omit one of them.")
    if options.resume == "auto" and options.out is None:
        parser.error("--resume=auto needs --out DIR, the directory of the run to begin or to continue.")


def command_parser() -> Parser:
    """Returns the parser of the command's options."""
    parser = Parser("torchmn train", "Trains the experiment in FILE.", EXPLANATION)
    parser.usage = (
        f"torchmn train FILE [-n N] [{'|'.join(mode.flag for mode in BASIC_MODES.values())}] [--grid HxW]\n"
        "                     [--data DIR] [--out DIR] [--resume|--resume=auto] [--sample 10%%] [--set KEY=VALUE ...]\n"
        "                     [--dry-run]"
    )
    add_file(parser)
    add_ranks(parser)
    add_modes(parser)
    add_values(parser)
    parser.add_argument("--epochs", metavar="E", help="number of epochs, instead of the one in FILE")
    parser.add_argument("-o", "--out", metavar="DIR", help="directory for log, checkpoints and report")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument(
        "--resume=auto",  # argparse compares whole words before it splits them at "="
        action="store_const",
        const="auto",
        dest="resume",
        help="continue if --out has a run, else begin: for jobs that are requeued",
    )
    parser.add_argument("--dry-run", action="store_true", help="run one step, and print shapes and memory")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end, and errors")
    parser.add_argument("-s", "--profile", action="store_true", help="print at the end how each rank spent its time")
    return parser


def _train(options: argparse.Namespace, experiment: Experiment, comm: Communicator) -> int:
    from rich.console import Console

    from torchmn.experiment.interruption import interruption
    from torchmn.experiment.train import Outcome, Request, train

    if options.dry_run:
        return _dry_run(options, experiment, comm)
    with interruption() as stop:
        request = Request(
            options.file,
            options.data,
            options.out,
            options.resume,
            stop,
            console=Console(quiet=True) if is_quiet(options) else None,
            profile=options.profile,
            resume_command=launcher_prefix(options) + command_line("train", options),
        )
        outcome: Outcome = train(experiment, comm, request)
    if options.json and comm.rank == 0:
        last = outcome.history[-1] if outcome.history else {}
        run = {"out": str(outcome.directory.path), "finished": outcome.finished}
        print(json.dumps({**run, **{name: _for_json(value) for name, value in last.items()}}))
    return 0 if outcome.finished else 128 + (stop.signum or 2)


def _for_json(value: float) -> float | str:
    return value if isfinite(value) else str(value)  # JSON has no NaN; as in log.jsonl it is a string


def _dry_run(options: argparse.Namespace, experiment: Experiment, comm: Communicator) -> int:
    from torchmn.experiment.dry_run import dry_run

    found = dry_run(experiment, comm, options.data)
    if comm.rank == 0 and options.json:
        print(json.dumps(_as_json(found)))
    elif comm.rank == 0 and not options.quiet:
        print(_as_text(found))
    return 0


def _as_text(found: DryRun) -> str:
    """Returns the layers, and the memory of each rank, as tables that fit the terminal."""
    layers = [("layer", "output", "weights", "")]
    layers += [
        (layer.name, layer.output, f"{layer.weights:,}" if layer.weights else "", layer.description)
        for layer in found.layers
    ]
    ranks = [("rank", "input", *_SIZES)]
    ranks += [
        (str(rank), " x ".join(map(str, use.inputs)), *(_size(getattr(use, size)) for size in _SIZES))
        for rank, use in enumerate(found.ranks)
    ]
    return "\n".join(
        [
            f"one step with {found.samples} samples; nothing is written",
            f"mode    {found.mode}",
            f"loss    {found.loss:.5g}",
            f"time    {found.seconds:.2f} s; later steps are faster",
            "",
            *_table(layers, left=(0, 3)),
            "",
            *_table(ranks),
            "",
            "activations: what forward saves for backward; process: the most that it used so",
            "far, with Python, torch and data",
        ]
    )


def _as_json(found: DryRun) -> dict[str, Any]:
    """Returns the same as plain values; sizes in bytes."""
    layers = [
        {"name": layer.name, "kind": layer.description, "output": layer.output, "weights": layer.weights}
        for layer in found.layers
    ]
    loss = found.loss if isfinite(found.loss) else str(found.loss)
    values = {"mode": found.mode, "samples": found.samples, "loss": loss, "seconds": found.seconds, "layers": layers}
    return {**values, "ranks": [{"rank": rank, **asdict(use)} for rank, use in enumerate(found.ranks)]}


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def _table(rows: list[tuple[str, ...]], left: tuple[int, ...] = ()) -> list[str]:
    """Returns the rows with aligned columns: those in `left` to the left, and the last cut between words to fit."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = shutil.get_terminal_size().columns
    lines = []
    for row in rows:
        cells = [f"{text:{'<' if n in left else '>'}{widths[n]}}" for n, text in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return [line if len(line) <= columns else f"{line[: columns - 3].rpartition(' ')[0]} ..." for line in lines]
