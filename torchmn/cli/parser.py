"""Parser: an ArgumentParser that rejects unknown options and suggests the nearest valid one."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from torchmn.cli.help_layout import HelpLayout, fitted
from torchmn.communicators.launchers.environment import detect

SIMILARITY = 0.65
"""Of two option names without their dashes, from which on one is suggested for the other."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose errors are short and exit with status 2.

    Attributes:
        file_keys: for names that are keys of an experiment file and not options, the path of the key: {"lr":
            "optimizer.lr"}.
        foreign: for names of options of other programs, the option to use: {"gpus": "-n"}.
    """

    def __init__(self, prog: str, description: str, epilog: str = ""):
        super().__init__(prog, None, description, epilog, formatter_class=HelpLayout, allow_abbrev=False)
        self.file_keys: Mapping[str, str] = {}
        self.foreign: Mapping[str, str] = {}

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Returns the options in `arguments`; exits with an error at the first unknown one."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            self.error(f"unknown argument {unknown[0]!r}.{self._advice(unknown[0], arguments)}")
        return options

    def _advice(self, argument: str, arguments: Sequence[str]) -> str:
        """Returns what to use instead of an unknown argument; "" if nothing is similar."""
        option, _, value = argument.partition("=")
        name = option.lstrip("-")
        key = self.file_keys.get(name.replace("_", "-"))
        if key is not None:
            value = value or _following(arguments, argument) or "VALUE"
            return f" It is a value of the file: use --set {key}={value}"
        if name in self.foreign:
            return f" Use {self.foreign[name]} instead."
        if name == "mode" and "--datapar" in self._option_string_actions:
            return f" Modes are options: use --{value or _following(arguments, argument) or 'datapar'}."
        long = {known.lstrip("-"): known for known in self._option_string_actions if known.startswith("--")}
        if not option.startswith("-"):
            return ""
        # An abbreviation, of three letters or more; else a misspelling.
        close = [known for known in long if len(name) > 2 and known.startswith(name)]
        close = close or difflib.get_close_matches(name, long, n=1, cutoff=SIMILARITY)
        return f" Did you mean {long[close[0]]!r}?" if close else ""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2. All ranks of a job have the same command line, so only rank 0 prints `message`."""
        text = f"{self.prog}: {message}\nSee `{self.prog} --help`.\n"
        self.exit(2, fitted(text, sys.stderr) if is_rank_0() else None)

    def takes_value(self, token: str) -> bool:
        """Returns whether `token` is an option whose value is the next argument."""
        action = self._option_string_actions.get(token)
        return action is not None and action.nargs != 0


def _following(arguments: Sequence[str], argument: str) -> str:
    """Returns the value after an option; "" if there is none."""
    following = [*arguments, ""][list(arguments).index(argument) + 1]
    return "" if following.startswith("--") else following


def is_rank_0() -> bool:
    """Returns whether this process is rank 0 of its job, or was started without a launcher."""
    return detect().rank == 0


def one_of(*names: str) -> Callable[[str], str]:
    """Returns an argparse type for an option that takes one of `names`."""

    def name_of(text: str) -> str:
        if text not in names:
            close = difflib.get_close_matches(text, names, n=1, cutoff=SIMILARITY)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}{hint}")
        return text

    return name_of


def at_least(smallest: int) -> Callable[[str], int]:
    """Returns an argparse type for an option that takes an integer of at least `smallest`."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {smallest}, got {text!r}")
        return int(text)

    return number


def add_start(parser: Parser) -> None:
    """Adds the options of commands that start ranks."""
    parser.add_argument(
        "--transport",
        metavar="mpi|gloo",
        type=one_of("mpi", "gloo"),
        help="transport between ranks; default: mpi if usable",
    )
    parser.add_argument("--threads", metavar="T", type=at_least(1), help="threads per rank")
    parser.add_argument("--anyway", action="store_true", help="start more ranks than fit into memory")
