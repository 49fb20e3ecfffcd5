"""`torchmn run`: a script on several ranks of this machine."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmn.cli.launch.job import Job, gloo_job, mpi_job, rank_environment
from torchmn.cli.launch.memory import check_memory
from torchmn.cli.launch.mpi_installation import MPIEXEC_VARIABLE, usable
from torchmn.cli.launch.supervisor import supervise
from torchmn.cli.parser import Parser, at_least, one_of
from torchmn.errors import LaunchError, nearest

EXPLANATION = f"""\
All that follows the script or the module belongs to it.

output       Each line is shown whole, behind the rank that printed it: "[2] loss 0.31". A progress bar that a
             rank draws over itself stays in the last row of a terminal; in a file only its final state
             appears. With --raw there are no prefixes, and rank 0 sees the terminal as if it ran alone.
input        Ranks read nothing: their standard input is empty. For a debugger use -n 1, which runs the
             script in this terminal, without any launcher.
exit status  That of the first rank that failed, 128 + n after signal n. The others are ended within 5 s.
Ctrl-C       Ends every rank and all that they started; so do SIGTERM, SIGHUP and SIGUSR1. Ranks have 3 s to
             clean up. Signals within a second of the first are the same request; a later one kills all at once.
transport    mpi where mpiexec and the library that mpi4py loads fit each other (`torchmn doctor` tells),
             else gloo. {MPIEXEC_VARIABLE} names another mpiexec.
memory       Ranks that would not fit into what is free are not started; --anyway starts them all the same.
threads      OMP_NUM_THREADS, unless it is set already: the cores of this machine, divided among the ranks.
"""


def main(arguments: Sequence[str]) -> int:
    """The exit status of the ranks that `torchmn run` with `arguments` starts."""
    parser = _parser()
    own, command = split(parser, arguments)
    options = parser.parse(own)
    if options.n is None:
        parser.error("how many ranks? Say -n N.")
    check_command(parser, command)
    check_memory(options.n, options.anyway)
    environment = rank_environment(options.n, options.threads)
    python = [sys.executable, *command]
    if options.n == 1 and options.transport is None:
        os.execve(sys.executable, python, environment)
    job = job_for(options.transport, options.n, python, environment)
    return supervise(job, raw=options.raw or options.n == 1)


def _parser() -> Parser:
    parser = Parser("torchmn run", "Starts a Python script on N ranks of this machine.", EXPLANATION)
    parser.usage = (
        "torchmn run -n N [--transport mpi|gloo] [--threads T] [--raw] [--anyway] (SCRIPT | -m MODULE) [ARGUMENTS ...]"
    )
    parser.add_argument("-n", "-np", metavar="N", type=at_least(1), help="how many ranks")
    parser.add_argument("-m", metavar="MODULE", help="run a module, as `python -m` does")
    parser.add_argument("--transport", metavar="mpi|gloo", type=one_of("mpi", "gloo"), help="what the ranks talk over")
    parser.add_argument("--threads", metavar="T", type=at_least(1), help="threads per rank")
    parser.add_argument("--anyway", action="store_true", help="also more ranks than there is memory for")
    parser.add_argument("--raw", action="store_true", help="output without prefixes; rank 0 has the terminal")
    return parser


def split(parser: Parser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the script or `-m module` with all that follows it."""
    place = 0
    while place < len(arguments):
        token = arguments[place]
        if token == "--":
            return list(arguments[:place]), list(arguments[place + 1 :])
        if token == "-m" or not token.startswith("-"):
            return list(arguments[:place]), list(arguments[place:])
        place += 2 if parser.takes_value(token) else 1
    return list(arguments), []


def check_command(parser: Parser, command: list[str]) -> None:
    """Ends the program with an error where there is no such script or module: once, and not on every rank."""
    if not command or command == ["-m"]:
        parser.error("which script? Name a Python file, or a module after -m.")
    if command[0] == "-m":
        name = command[1].partition(".")[0]
        here = [os.getcwd(), *sys.path]
        if name not in sys.builtin_module_names and not importlib.machinery.PathFinder.find_spec(name, here):
            parser.error(f"there is no module {name!r} in {os.getcwd()} or in this Python.")
        return
    script = Path(command[0])
    if script.suffix in (".yaml", ".yml"):
        parser.error(f"{script} is no Python script. An experiment is started by: torchmn train {script} -n N")
    if not script.exists():
        beside = [path.name for path in script.parent.glob("*.py")] if script.parent.is_dir() else []
        parser.error(f"there is no script {str(script)!r}." + (f" {nearest(script.name, beside)}" if beside else ""))


def job_for(transport: str | None, size: int, command: list[str], environment: dict[str, str]) -> Job:
    """The job of `command` on `size` ranks over `transport`, or over what this machine has."""
    if transport == "gloo":
        return gloo_job(size, command, environment)
    try:
        return mpi_job(usable(), size, command, environment)
    except LaunchError as error:
        if transport == "mpi" or os.environ.get(MPIEXEC_VARIABLE):
            raise LaunchError(f"{error}. See `torchmn doctor`, or use --transport gloo.") from error
        print(f"torchmn run: over gloo, because {error}. See `torchmn doctor`.", file=sys.stderr, flush=True)
        return gloo_job(size, command, environment)
