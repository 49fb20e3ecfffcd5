"""Options that the commands on experiment files share, and the overrides of the file that they stand for."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from torchmn.cli.parser import Parser, add_start, at_least, one_of
from torchmn.errors import ExperimentError
from torchmn.modes import BASIC_MODES, MODES

if TYPE_CHECKING:
    from torchmn.experiment import Override

GRID_AXES = ("depth", "height", "width")


FILE_KEYS = {
    "lr": "optimizer.lr",
    "learning-rate": "optimizer.lr",
    "momentum": "optimizer.momentum",
    "weight-decay": "optimizer.weight_decay",
    "optimizer": "optimizer.name",
    "batch-size": "batch_size",
    "bs": "batch_size",
    "dtype": "dtype",
    "metrics": "metrics",
    "shuffle": "shuffle",
    "keep": "keep",
}
"""Values of an experiment file that users of other programs expect to be options."""


def add_file(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="experiment file")
    parser.file_keys = FILE_KEYS


FOREIGN: dict[str, str] = dict.fromkeys(
    ("np", "nproc", "nproc-per-node", "num-processes", "num-workers", "ranks", "gpus", "devices", "workers"), "-n N"
)
"""Options of other programs for the number of ranks."""


def add_ranks(parser: Parser) -> None:
    parser.foreign = FOREIGN
    parser.add_argument("-n", "-np", metavar="N", type=at_least(1), help="start N ranks on this machine")
    add_start(parser)


def add_modes(parser: Parser) -> None:
    helps = {name: mode.description for name, mode in BASIC_MODES.items()}
    helps["modelpar"] += f"; with --datapar, {MODES['hybrid'].description}"
    for name, mode in BASIC_MODES.items():
        parser.add_argument(*filter(None, [mode.short]), mode.flag, action="store_true", help=helps[name])
    parser.add_argument(
        "--grid", metavar="HxW", type=grid, help="process grid: 2x2 (height x width), or data=2,height=2"
    )


def add_run(parser: Parser) -> None:
    parser.add_argument("file", metavar="DIR|FILE", help="directory of `torchmn train --out`, or experiment file")
    parser.file_keys = FILE_KEYS
    parser.add_argument("--checkpoint", metavar="DIR", help="directory of the run, if FILE is given")
    splits = ("test", "validation", "train")
    parser.add_argument(
        "--split", metavar="|".join(splits), type=one_of(*splits), default="test", help="samples to use; default: test"
    )


def add_values(parser: Parser) -> None:
    parser.add_argument("--data", metavar="DIR", help="directory of the data set")
    parser.add_argument("--sample", metavar="10%", help="use only a part of the data")
    parser.add_argument("-r", "--seed", metavar="S", help="random seed, instead of the one in FILE")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="override a value of FILE: optimizer.lr=0.1"
    )


def resolve_run(parser: Parser, options: argparse.Namespace) -> None:
    """Sets the file of a run that is given by its directory, or exits with an error if no run is given."""
    from torchmn.experiment.run.run_directory import run_directory_of

    if os.path.isdir(options.file):
        run = run_directory_of(options.file)
        if options.checkpoint is None:
            options.checkpoint = str(run.path)
        if not run.experiment.is_file():
            parser.error(f"there is no run of `torchmn train` in {options.file}: it has no {run.experiment.name}.")
        options.file = str(run.experiment)
    elif options.checkpoint is None and not os.path.exists(options.file):
        runs = [
            str(path) for path in sorted(Path("runs").glob("*")) if run_directory_of(str(path)).experiment.is_file()
        ]
        hint = f" Runs here: {', '.join(runs[-5:])}." if runs else ""
        parser.error(f"there is no directory or file {options.file!r}.{hint}")
    elif options.checkpoint is None:
        file = shlex.quote(options.file)
        parser.error(
            f"the directory of the run is missing: {parser.prog} DIR, or {parser.prog} {file} --checkpoint DIR."
        )


def grid(text: str) -> dict[str, int]:
    """Returns the axis sizes of `2x2` (height, width), `2x2x2` (with depth) or `data=2,height=2`."""
    if re.fullmatch(r"\d+(x\d+){0,2}", text):
        sizes = [int(part) for part in text.split("x")]
        axes: dict[str, int] = dict(zip(GRID_AXES[3 - len(sizes) :], sizes, strict=True))
    elif re.fullmatch(r"(data|depth|height|width)=\d+(,(data|depth|height|width)=\d+)*", text):
        axes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    else:
        raise argparse.ArgumentTypeError(f"expected a grid: 2x2 (height x width) or data=2,height=2, got {text!r}")
    if min(axes.values()) < 1:
        raise argparse.ArgumentTypeError(f"expected at least one rank along each axis, got {text!r}")
    return axes


def command_line(name: str, options: argparse.Namespace) -> str:
    """Returns a command line with the same ranks, mode, data and overrides as `options`."""
    words = ["torchmn", name, options.file]
    for flag in ("n", "transport", "threads"):
        if (value := getattr(options, flag)) is not None:
            words += ["-n" if flag == "n" else f"--{flag}", str(value)]
    words += [mode.flag for mode in BASIC_MODES.values() if getattr(options, mode.name)]
    if options.grid:
        words += ["--grid", ",".join(f"{axis}={count}" for axis, count in options.grid.items())]
    for flag in ("data", "sample", "epochs", "seed"):
        if (value := getattr(options, flag)) is not None:
            words += [f"--{flag}", value]
    for text in options.set:
        words += ["--set", text]
    return shlex.join(words)


def overrides(options: argparse.Namespace) -> list[Override]:
    """Returns the overrides of the file's values by options; later ones take precedence."""
    from torchmn.experiment import Override, parse_set

    found = [parse_set(text) for text in options.set]
    for flag, path in (("sample", ("dataset", "sample")), ("epochs", ("epochs",)), ("seed", ("seed",))):
        if (text := getattr(options, flag, None)) is not None:  # only `train` takes --epochs
            value = parse_set(f"x={text}").value
            found.append(Override(path, value, f"--{flag} {text}"))
    return found


def parallel_overrides(options: argparse.Namespace) -> list[Override]:
    """Returns the overrides of the section `parallel` by the options for modes and grid."""
    from torchmn.experiment import Override

    if not hasattr(options, "grid"):  # a command without modes
        return []
    flags = tuple(mode for mode in BASIC_MODES if getattr(options, mode))
    mode = next((mode for mode in MODES.values() if mode.flags == flags), None)
    if flags and mode is None:
        advice = ": use --halodatapar" if set(flags) == {"datapar", "halopar"} else ""
        named = " and ".join(f"--{flag}" for flag in flags)
        raise ExperimentError(f"{named} cannot be combined, only --datapar and --modelpar can be{advice}")
    found = []
    if mode is not None:
        # Replaces the whole section: a grid in the file belongs to the mode in the file.
        found.append(Override(("parallel",), {"mode": mode.name}, mode.flag))
    if options.grid:
        found.append(Override(("parallel", "grid"), dict(options.grid), f"--grid {options.grid}"))
    return found
