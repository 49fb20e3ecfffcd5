"""On which ranks a command on an experiment runs: those that are there, this process, or ranks started here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from math import prod

from torchmn.cli.commands.run import job_for
from torchmn.cli.launch.job import rank_environment
from torchmn.cli.launch.memory import check_memory
from torchmn.cli.launch.supervisor import RANKS_MAY_CLEAN_UP, supervise
from torchmn.cli.parser import Parser
from torchmn.cli.start import START
from torchmn.communicators.launchers.environment import Launch, detect
from torchmn.modes import BASIC_MODES

SECONDS_TO_SAVE = 60.0
"""How long ranks may take to save a checkpoint after Ctrl-C."""


def started_elsewhere(
    parser: Parser,
    name: str,
    arguments: Sequence[str],
    options: argparse.Namespace,
    ranks: int,
    check: Callable[[], None],
) -> int | None:
    """The exit status of `ranks` ranks that were started to do this; None if this process is to do it.

    `check` is called before any are started: what it raises is said once.
    """
    launch = detect()
    if is_rank(launch):
        if options.n is not None and options.n != launch.size:
            started = "this rank" if launch.size is None else f"{launch.size} ranks"
            parser.error(f"-n {options.n}, but {launch.name} has started {started}: leave out -n.")
        return None
    if ranks == 1:
        asked = prod((getattr(options, "grid", None) or {}).values())
        if asked > 1:
            parser.error(f"--grid is for {asked} ranks, and there is one: say -n {asked}.")
        return None
    check_memory(ranks, options.anyway)
    check()
    environment = rank_environment(ranks, options.threads)
    command = [sys.executable, START, name, *arguments]
    job = job_for(options.transport, ranks, command, environment)
    patience = SECONDS_TO_SAVE if name == "train" else RANKS_MAY_CLEAN_UP
    return supervise(job, raw=True, patience=patience, explained=2)


def note_idle_modes(options: argparse.Namespace) -> None:
    """Say that the modes on the command line do nothing, where there is one rank: -n may have been forgotten."""
    named = [mode.flag for mode in BASIC_MODES.values() if getattr(options, mode.name, False)]
    if named and not is_rank(detect()):
        print(f"one rank, which divides nothing: {' '.join(named)} goes with -n N", file=sys.stderr)


def is_rank(launch: Launch) -> bool:
    """Whether a launcher started this process as one of several ranks, or does not say of how many."""
    return launch.transport != "solo" and launch.may_be_several


def started_by(options: argparse.Namespace) -> str:
    """What stands before `torchmn` on a command line that starts as many ranks again; nothing, where -n says it."""
    launch = detect()
    if not is_rank(launch) or options.n is not None:
        return ""
    size = launch.size or "N"
    starters = {"slurm": f"srun -n {size} ", "torchrun": f"torchrun --nproc-per-node {size} --no-python "}
    return starters.get(launch.name, f"mpiexec -n {size} ")
