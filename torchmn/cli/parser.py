"""Command lines that refuse what they do not know, and offer the nearest name that they do."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from torchmn.communicators.launchers.environment import detect
from torchmn.errors import nearest


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose errors are one sentence and exit status 2."""

    def __init__(self, prog: str, description: str, epilog: str = ""):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=layout, allow_abbrev=False)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options in `arguments`, all of which must be known."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            name = unknown[0].partition("=")[0]
            self.error(f"{unknown[0]!r} is not known here. {nearest(name, self._option_string_actions)}")
        return options

    def error(self, message: str) -> NoReturn:
        """Ends the program with `message`; of the ranks of a job, whose command lines are the same, rank 0 says it."""
        said = f"{self.prog}: {message}\n`{self.prog} --help` shows what there is.\n"
        self.exit(2, said if speaks() else None)

    def takes_value(self, token: str) -> bool:
        """Whether `token` is an option whose value is the next word."""
        action = self._option_string_actions.get(token)
        return action is not None and action.nargs != 0


def speaks() -> bool:
    """Whether this process is the one to print: rank 0, or the only one."""
    return detect().rank == 0


def one_of(*names: str) -> Callable[[str], str]:
    """A type for an option that takes one of `names`."""

    def name_of(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}. {nearest(text, names)}")
        return text

    return name_of


def at_least(smallest: int) -> Callable[[str], int]:
    """A type for an option that takes a whole number of at least `smallest`."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {smallest}, got {text!r}")
        return int(text)

    return number
