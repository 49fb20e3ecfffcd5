"""Flags that the commands on experiment files share, and what they say about the file."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import TYPE_CHECKING

from torchmn.cli.parser import Parser, at_least, one_of
from torchmn.errors import ExperimentError
from torchmn.modes import BASIC_MODES, MODES

if TYPE_CHECKING:
    from torchmn.experiment import Override

GRID_AXES = ("depth", "height", "width")


def add_file(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="the experiment")


def add_ranks(parser: Parser) -> None:
    parser.add_argument("-n", "-np", metavar="N", type=at_least(1), help="start N ranks on this machine")
    parser.add_argument("--transport", metavar="mpi|gloo", type=one_of("mpi", "gloo"), help="what the ranks talk over")
    parser.add_argument("--threads", metavar="T", type=at_least(1), help="threads per rank")
    parser.add_argument("--anyway", action="store_true", help="also more ranks than there is memory for")


def add_modes(parser: Parser) -> None:
    helps = {name: mode.description for name, mode in BASIC_MODES.items()}
    helps["modelpar"] += f"; with --datapar, {MODES['hybrid'].description}"
    for name, mode in BASIC_MODES.items():
        parser.add_argument(*filter(None, [mode.short]), mode.flag, action="store_true", help=helps[name])
    parser.add_argument(
        "--grid", metavar="HxW", type=grid, help="how the ranks of an image stand: 2x2, or data=2,height=2"
    )


def add_trained(parser: Parser) -> None:
    parser.add_argument("--checkpoint", metavar="DIR", required=True, help="what `torchmn train --out` named")
    splits = ("test", "validation", "train")
    parser.add_argument("--split", metavar="|".join(splits), type=one_of(*splits), default="test", help="which samples")


def add_values(parser: Parser) -> None:
    parser.add_argument("--data", metavar="DIR", help="where the data set is")
    parser.add_argument("--sample", metavar="10%", help="take only a share of the data")
    parser.add_argument("-r", "--seed", metavar="S", help="another seed")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="another value in the file, as optimizer.lr=0.1"
    )


def grid(text: str) -> dict[str, int]:
    """The axes of `2x2` (height, width), `2x2x2` (depth too) or `data=2,height=2`."""
    if re.fullmatch(r"\d+(x\d+){0,2}", text):
        sizes = [int(part) for part in text.split("x")]
        axes: dict[str, int] = dict(zip(GRID_AXES[3 - len(sizes) :], sizes, strict=True))
    elif re.fullmatch(r"(data|depth|height|width)=\d+(,(data|depth|height|width)=\d+)*", text):
        axes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    else:
        raise argparse.ArgumentTypeError(f"expected a grid as 2x2 (height x width) or data=2,height=2, got {text!r}")
    if min(axes.values()) < 1:
        raise argparse.ArgumentTypeError(f"expected at least one rank along each axis, got {text!r}")
    return axes


def command_of(name: str, options: argparse.Namespace) -> str:
    """The command line that says again what the options say about ranks, modes, data and values of the file."""
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
    """What the flags say about the file, in the order in which later ones win."""
    from torchmn.experiment import Override, parse_set

    found = [parse_set(text) for text in options.set]
    for flag, path in (("sample", ("dataset", "sample")), ("epochs", ("epochs",)), ("seed", ("seed",))):
        if (text := getattr(options, flag, None)) is not None:  # only `train` takes --epochs
            said = f"--{flag} {text}"
            value = parse_set(f"x={text}").value
            found.append(Override(path, value, said))
    return found


def parallel_overrides(options: argparse.Namespace) -> list[Override]:
    """What the flags of modes say."""
    from torchmn.experiment import Override

    if not hasattr(options, "grid"):  # a command without modes
        return []
    flags = tuple(mode for mode in BASIC_MODES if getattr(options, mode))
    mode = next((mode for mode in MODES.values() if mode.flags == flags), None)
    if flags and mode is None:
        raise ExperimentError(f"--{flags[0]} and --{flags[1]} do not go together; --datapar and --modelpar do")
    found = []
    if mode is not None:
        # A grid of the file belongs to the mode of the file.
        found.append(Override(("parallel",), {"mode": mode.name}, mode.flag))
    if options.grid:
        found.append(Override(("parallel", "grid"), dict(options.grid), f"--grid {options.grid}"))
    return found
