"""Parser: an ArgumentParser that rejects unknown options and suggests the nearest valid one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from torchmn.communicators.launchers.environment import detect
from torchmn.errors import nearest


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose errors are short and exit with status 2."""

    def __init__(self, prog: str, description: str, epilog: str = ""):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=layout, allow_abbrev=False)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Returns the options in `arguments`; exits with an error at the first unknown one."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            name = unknown[0].partition("=")[0]
            self.error(f"unknown argument {unknown[0]!r}. {nearest(name, self._option_string_actions)}")
        return options

    def error(self, message: str) -> NoReturn:
        """Exits with status 2. All ranks of a job have the same command line, so only rank 0 prints `message`."""
        text = f"{self.prog}: {message}\nSee `{self.prog} --help`.\n"
        self.exit(2, text if is_rank_0() else None)

    def takes_value(self, token: str) -> bool:
        """Returns whether `token` is an option whose value is the next argument."""
        action = self._option_string_actions.get(token)
        return action is not None and action.nargs != 0


def is_rank_0() -> bool:
    """Returns whether this process is rank 0 of its job, or was started without a launcher."""
    return detect().rank == 0


def one_of(*names: str) -> Callable[[str], str]:
    """Returns an argparse type for an option that takes one of `names`."""

    def name_of(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}. {nearest(text, names)}")
        return text

    return name_of


def at_least(smallest: int) -> Callable[[str], int]:
    """Returns an argparse type for an option that takes an integer of at least `smallest`."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {smallest}, got {text!r}")
        return int(text)

    return number
