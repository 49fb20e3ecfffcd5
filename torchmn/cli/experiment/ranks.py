"""Chooses the ranks of a command on an experiment: those of a launcher, this process alone, or newly started ones."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from math import prod

from torchmn.cli.launch.job import job_for, rank_environment, warn_few_cores
from torchmn.cli.launch.memory import check_memory
from torchmn.cli.launch.supervisor import CLEANUP_SECONDS, supervise
from torchmn.cli.parser import Parser
from torchmn.cli.start import START
from torchmn.communicators.launchers import pmi
from torchmn.communicators.launchers.environment import Launch, detect
from torchmn.modes import BASIC_MODES

CHECKPOINT_SECONDS = 60.0
"""Time for ranks to save a checkpoint after Ctrl-C."""

COMMANDS = {
    "openmpi": "mpirun",
    "mpirun_rsh": "mpirun_rsh",
    "jsm": "jsrun",
    "alps": "aprun",
    "pmix": "prterun",
    "flux": "flux run",
}
"""The commands of launchers that are neither srun, torchrun nor called mpiexec; each takes -n."""


def run_on_new_ranks(
    parser: Parser,
    name: str,
    arguments: Sequence[str],
    options: argparse.Namespace,
    ranks: int,
    check: Callable[[], None],
) -> int | None:
    """Starts `ranks` ranks that run the command, if this process is not to run it itself.

    Args:
        parser: reports errors in the command line.
        name: of the command.
        arguments: its command line.
        options: parsed from it.
        ranks: number of ranks to run on, unless a launcher has started this process.
        check: called before ranks are started; it raises errors once instead of on every rank.

    Returns:
        The exit status of the new ranks, or None if this process is to run the command.
    """
    launch = detect()
    if is_rank(launch):
        if options.n is not None and options.n != launch.size:
            started = "this rank" if launch.size is None else f"{launch.size} ranks"
            parser.error(f"-n {options.n}, but {launch.name} has started {started}: omit -n.")
        return None
    if ranks == 1:
        grid_size = prod((getattr(options, "grid", None) or {}).values())
        if grid_size > 1:
            parser.error(f"--grid needs {grid_size} ranks, and there is one: use -n {grid_size}.")
        return None
    check_memory(ranks, options.anyway)
    check()
    warn_few_cores(ranks)
    environment = rank_environment(ranks, options.threads)
    command = [sys.executable, START, name, *arguments]
    job = job_for(options.transport, ranks, command, environment)
    patience = CHECKPOINT_SECONDS if name == "train" else CLEANUP_SECONDS
    return supervise(job, raw=True, patience=patience, reported_status=2)


def warn_unused_modes(options: argparse.Namespace) -> None:
    """Prints a warning if the command line selects a mode for one rank, where -n may have been forgotten."""
    named = [mode.flag for mode in BASIC_MODES.values() if getattr(options, mode.name, False)]
    if named and not is_rank(detect()):
        print(f"{' '.join(named)} has no effect on one rank: use -n N to start several", file=sys.stderr)


def is_rank(launch: Launch) -> bool:
    """Returns whether a launcher started this process as one of several ranks, or of an unknown number."""
    return launch.transport != "solo" and launch.may_be_several


def launcher_prefix(options: argparse.Namespace) -> str:
    """Returns the part before `torchmn` of a command line that starts as many ranks; "" if -n does."""
    launch = detect()
    if not is_rank(launch) or options.n is not None:
        return ""
    if launch.name == "torchrun":
        return f"torchrun {_places()} --no-python "
    kind = pmi.offered()
    command = f"srun --mpi={kind}" if kind else COMMANDS.get(launch.name, "mpiexec")
    return f"{command} -n {launch.size or 'N'} "


def _places() -> str:
    """Returns the options of torchrun that start as many ranks on each host; NODE stands for the host's number."""
    nodes, ranks = (os.environ.get(name) or "N" for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if nodes == "1":
        return f"--nproc-per-node {ranks}"
    first, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return f"--nnodes {nodes} --nproc-per-node {ranks} --node-rank NODE --master-addr {first} --master-port {port}"
