"""Entry point of the `torchmn` command. Only the module of the chosen sub-command is imported."""

from __future__ import annotations

import importlib
import io
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from torchmn import __version__
from torchmn.cli.help_layout import fitted
from torchmn.cli.parser import Parser
from torchmn.communicators.launchers.environment import detect
from torchmn.errors import TorchMNError, nearest

COMMANDS = {
    "new": "write an example experiment file",
    "train": "train the experiment in a YAML file, on one rank or many",
    "evaluate": "print loss and metrics of a trained experiment",
    "predict": "write the outputs of a trained experiment to a file",
    "verify": "train a few steps in every mode and compare with one rank",
    "schema": "print the JSON schema of experiment files, for editors",
    "convert": "convert a neon experiment file to TorchMN's format",
    "run": "start a script on several ranks of this machine",
    "completion": "print a script that completes commands and options in a shell",
    "doctor": "check this machine (or --hosts) step by step, with advice",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the `torchmn` command.

    Args:
        arguments: command line without the program's name; by default that of this process.

    Returns:
        The exit status.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _print_any_text()
    parser = main_parser()
    if not arguments:
        parser.print_help()
        return 2
    name, *rest = arguments
    if name.startswith("-"):
        parser.parse(arguments)  # exits: --help, --version or an error
    if name == "help":
        return main([*rest[:1], "--help"])
    if name not in COMMANDS:
        parser.error(f"there is no command {name!r}. {_advice(name)}")
    try:
        return importlib.import_module(f"torchmn.cli.commands.{name}").main(rest)
    except BrokenPipeError:
        # The reader of our output has exited (`| head`). Python would report the broken pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        if detect().may_be_several:
            raise  # the hook for uncaught exceptions ends the other ranks
        return 128 + signal.SIGINT
    except TorchMNError as error:
        print(fitted(f"torchmn {name}: {error}", sys.stderr), file=sys.stderr)
        return 2


def _print_any_text() -> None:
    """Lets names of files that are not UTF-8, and any text on an ASCII terminal, be printed with escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _advice(name: str) -> str:
    """Returns what to use instead of an unknown command."""
    if name.endswith((".yaml", ".yml")):
        return f"To train an experiment: torchmn train {shlex.quote(name)}"
    if name.endswith(".py"):
        return f"To start a script: torchmn run -n N {shlex.quote(name)}"
    return nearest(name, COMMANDS)


def main_parser() -> Parser:
    """Returns the parser of `torchmn` without a command: its help lists them."""
    width = max(map(len, COMMANDS))
    parser = Parser(
        "torchmn",
        "Trains PyTorch models across processes and machines, with the same numbers at any number of ranks.",
        "commands:\n"
        + "".join(f"  {name:{width}}  {purpose}\n" for name, purpose in COMMANDS.items())
        + "\nSee `torchmn COMMAND --help` for the options of a command.",
    )
    parser.usage = "torchmn COMMAND ..."
    parser.add_argument("--version", action="version", version=f"torchmn {__version__}")
    return parser


if __name__ == "__main__":
    # With `python -m torchmn.cli.main`, files in the working directory must not shadow standard modules.
    if sys.path[0] == os.getcwd():
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
