"""`torchmn run`: starts a script on several ranks of this machine."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmn.cli.launch.job import job_for, rank_environment, torch_variables, warn_few_cores
from torchmn.cli.launch.memory import check_memory
from torchmn.cli.launch.mpi_installation import MPIEXEC_VARIABLE
from torchmn.cli.launch.supervisor import supervise
from torchmn.cli.parser import Parser, add_start, at_least
from torchmn.errors import nearest

EXPLANATION = f"""\
All arguments after the script or the module are passed to it.

output       Lines are never mixed, and are prefixed with their rank: "[2] loss 0.31". A progress bar stays in the
             last row of a terminal; in a file only its final state appears. With --raw there are no prefixes,
             and rank 0 writes directly to the terminal.
input        The standard input of ranks is empty. For a debugger use -n 1, which runs the script in this
             terminal, without a launcher.
exit status  That of the first rank that failed, 128 + n after signal n. The other ranks are ended within 5 s.
Ctrl-C       Ends all ranks and the processes that they started; so do SIGTERM, SIGHUP and SIGUSR1. Ranks have 3 s
             to clean up. Signals within one second count as one; a later signal kills all ranks immediately.
transport    mpi if mpiexec belongs to the MPI library that mpi4py loads (see `torchmn doctor`), otherwise gloo.
             {MPIEXEC_VARIABLE} selects another mpiexec.
torch        Ranks also get RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: scripts that use
             torch.distributed directly run unchanged.
memory       Ranks that need more memory than is free are an error; --anyway starts them nevertheless.
threads      OMP_NUM_THREADS defaults to the number of cores divided by the number of ranks.
"""


def main(arguments: Sequence[str]) -> int:
    """Starts the ranks and waits for them; returns the exit status."""
    parser = command_parser()
    own, command = split(parser, arguments)
    options = parser.parse(own)
    if options.n is None:
        parser.error("the number of ranks is missing: use -n N.")
    check_command(parser, command)
    check_memory(options.n, options.anyway)
    warn_few_cores(options.n)
    environment = rank_environment(options.n, options.threads)
    python = [sys.executable, *command]
    if options.n == 1 and options.transport is None:
        variables, reservation = torch_variables(1, environment)
        reservation.close()
        os.execve(sys.executable, python, {**environment, **variables, "RANK": "0", "LOCAL_RANK": "0"})
    job = job_for(options.transport, options.n, python, environment)
    return supervise(job, raw=options.raw or options.n == 1)


def command_parser() -> Parser:
    """Returns the parser of the command's options."""
    parser = Parser("torchmn run", "Starts a Python script on N ranks of this machine.", EXPLANATION)
    parser.usage = (
        "torchmn run -n N [--transport mpi|gloo] [--threads T] [--raw] [--anyway] (SCRIPT | -m MODULE) [ARGUMENTS ...]"
    )
    parser.add_argument("-n", "-np", metavar="N", type=at_least(1), help="number of ranks")
    parser.add_argument("-m", metavar="MODULE", help="run a module, as `python -m` does")
    add_start(parser)
    parser.add_argument("--raw", action="store_true", help="output without prefixes; rank 0 writes to the terminal")
    return parser


def split(parser: Parser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the options of `torchmn run`, and the script or `-m module` with its arguments."""
    index = 0
    while index < len(arguments):
        token = arguments[index]
        if token == "--":
            return list(arguments[:index]), list(arguments[index + 1 :])
        if token == "-m" or not token.startswith("-"):
            return list(arguments[:index]), list(arguments[index:])
        index += 2 if parser.takes_value(token) else 1
    return list(arguments), []


def check_command(parser: Parser, command: list[str]) -> None:
    """Exits with an error if the script or module does not exist, before any rank starts."""
    if not command or command == ["-m"]:
        parser.error("the script is missing: give a Python file, or a module after -m.")
    if command[0] == "-m":
        name = command[1].partition(".")[0]
        search_path = [os.getcwd(), *sys.path]
        if name not in sys.builtin_module_names and not importlib.machinery.PathFinder.find_spec(name, search_path):
            parser.error(f"there is no module {name!r} in {os.getcwd()} or in this Python.")
        return
    script = Path(command[0])
    if script.suffix in (".yaml", ".yml"):
        parser.error(f"{script} is not a Python script. To train an experiment: torchmn train {script} -n N")
    if not script.exists():
        beside = [path.name for path in script.parent.glob("*.py")] if script.parent.is_dir() else []
        parser.error(f"there is no script {str(script)!r}." + (f" {nearest(script.name, beside)}" if beside else ""))
