"""The `torchmn` command. Imports a sub-command only when it is asked for."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from torchmn import __version__
from torchmn.cli.parser import Parser
from torchmn.communicators.launchers.environment import detect
from torchmn.errors import TorchMNError, nearest

COMMANDS = {
    "new": "write an experiment file to start from",
    "train": "train the experiment in a YAML file, on one rank or many",
    "evaluate": "loss and metrics of a trained experiment",
    "predict": "the outputs of a trained experiment, as a file",
    "verify": "train a few steps in every mode, and compare with one rank",
    "schema": "the JSON schema of experiment files, for editors",
    "convert": "write a neon experiment in our format",
    "run": "start a script on several ranks of this machine, over MPI or gloo",
    "doctor": "check this machine (or --hosts) step by step, and say what to do",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of `torchmn` with `arguments`, by default those of this process."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    name, *rest = arguments
    if name.startswith("-"):
        parser.parse(arguments)  # ends the program for --help, --version and what is unknown
    if name not in COMMANDS:
        parser.error(f"there is no command {name!r}. {nearest(name, COMMANDS)}")
    try:
        return importlib.import_module(f"torchmn.cli.commands.{name}").main(rest)
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`): that is their right. Python would complain once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        if detect().may_be_several:
            raise  # the hook for uncaught errors ends the other ranks
        return 128 + signal.SIGINT  # before there is anything to save: nobody needs a traceback
    except TorchMNError as error:
        print(f"torchmn {name}: {error}", file=sys.stderr)
        return 2


def _parser() -> Parser:
    width = max(map(len, COMMANDS))
    parser = Parser(
        "torchmn",
        "PyTorch across processes and machines, with the same numbers at any number of ranks.",
        "commands:\n"
        + "".join(f"  {name:{width}}  {purpose}\n" for name, purpose in COMMANDS.items())
        + "\n`torchmn COMMAND --help` explains a command.",
    )
    parser.usage = "torchmn COMMAND ..."
    parser.add_argument("--version", action="version", version=f"torchmn {__version__}")
    return parser


if __name__ == "__main__":
    if sys.path[0] == os.getcwd():  # `python -m torchmn.cli.main`: files here must not replace Python's modules
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
