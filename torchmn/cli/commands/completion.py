"""`torchmn completion`: prints a script with which a shell completes commands and options."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, cast

from torchmn.cli.commands.new import starters
from torchmn.cli.parser import Parser, one_of

SHELLS = ("bash", "zsh")
PATHS = {"FILE", "FILE.npz", "DIR", "DIR|FILE", "OLD", "NEW", "SCRIPT"}
"""Names of arguments that are completed by files and directories."""
EXPLANATION = """\
Write it to a file from which the shell loads completions:

    torchmn completion bash > ~/.local/share/bash-completion/completions/torchmn
    torchmn completion zsh > "${fpath[1]}/_torchmn"

It needs the package shtab: pip install shtab
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the script; returns the exit status."""
    parser = command_parser()
    options = parser.parse(arguments)
    try:
        import shtab
    except ImportError:
        parser.error("the package shtab is missing. Install it: pip install shtab")
    print(shtab.complete(_all_commands(), options.shell))
    return 0


def command_parser() -> Parser:
    """Returns the parser of the command's options."""
    parser = Parser(
        "torchmn completion", "Prints a script that completes commands and options in a shell.", EXPLANATION
    )
    parser.usage = "torchmn completion bash|zsh"
    parser.add_argument("shell", metavar="|".join(SHELLS), type=one_of(*SHELLS), help="the shell")
    return parser


def _all_commands() -> Parser:
    """Returns a parser with the commands as subcommands, as shtab expects them."""
    from torchmn.cli.main import COMMANDS, main_parser

    parser = main_parser()
    # argparse calls a class here; any function that returns the parser of a command will do.
    commands = parser.add_subparsers(parser_class=cast(Any, lambda prog, **_: _command_parser(prog)))
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose)
    return parser


def _command_parser(prog: str) -> Parser:
    """Returns the parser of a command, whose arguments have the values or files that complete them."""
    import shtab

    command = prog.split()[-1]
    parser: Parser = importlib.import_module(f"torchmn.cli.commands.{command}").command_parser()
    if command == "run":  # it separates the script from its options before it parses them
        parser.add_argument("script", metavar="SCRIPT", nargs="?")
    for action in parser._actions:
        words = str(action.metavar).split("|")
        if command == "new" and action.dest == "name":
            action.choices = list(starters())
        elif len(words) > 1 and str(action.metavar).islower():  # "mpi|gloo"
            action.choices = words
        elif action.metavar in PATHS:
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    return parser
