"""Which launcher started this process, read from a table of environment variables.

Imports neither torch nor MPI: the answer is needed before either is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torchmn.errors import LaunchError

Transport = Literal["mpi", "torch", "solo"]


@dataclass(frozen=True)
class Launcher:
    """One row of the table: the variables by which a launcher tells a process its place.

    The row applies when `rank` and every variable of `markers` are set (an empty value counts as not set).
    `size` and `local_rank` list alternatives, best first. Without `needs` the transport can not start.
    `alone` is the transport of a world of one, where it differs.
    """

    name: str
    title: str
    transport: Transport
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    markers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    alone: Transport | None = None


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process. `local_rank` is None where the launcher does not tell."""

    name: str
    transport: Transport
    rank: int
    size: int
    local_rank: int | None


# `torchmn run` sets this on gloo ranks, beside the variables that torchrun sets.
RUN_MARKER = "TORCHMN_RUN"


def _torch_row(name: str, title: str, marker: str | None = None, alone: Transport | None = None) -> Launcher:
    markers = (marker,) if marker else ()
    rendezvous = ("MASTER_ADDR", "MASTER_PORT")
    return Launcher(
        name, title, "torch", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), markers, needs=rendezvous, alone=alone
    )


def _world_row(name: str, title: str, prefix: str) -> Launcher:
    return Launcher(name, title, "mpi", f"{prefix}_RANK", (f"{prefix}_SIZE",), (f"{prefix}_LOCAL_RANK",))


def _hydra_row(name: str, title: str, markers: tuple[str, ...] = ()) -> Launcher:
    return Launcher(name, title, "mpi", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "SLURM_LOCALID"), markers)


# The first row that applies wins, so the order says which launcher is the innermost one.
LAUNCHERS = (
    # torchrun first: clusters start one torchrun per host with mpiexec or srun, and its workers inherit the
    # outer launcher's variables. Only torchrun sets its marker; a container's leftover RANK is not enough.
    _torch_row("torchrun", "torchrun", marker="TORCHELASTIC_RUN_ID"),
    # MPI launchers before Slurm: in an allocation they start their daemons with srun, so their ranks also
    # carry the SLURM_PROCID of a daemon, which numbers hosts and not ranks. Open MPI before Hydra: Slurm's
    # PMI plugins leave PMI_RANK=0 on an mpirun that srun started, and Hydra never sets OMPI_*.
    _world_row("openmpi", "Open MPI", prefix="OMPI_COMM_WORLD"),
    _world_row("mvapich", "MVAPICH", prefix="MV2_COMM_WORLD"),
    # Intel MPI is a Hydra with a mark of its own. I_MPI_ROOT is no such mark: Intel's set-up scripts set it,
    # whichever MPI is used afterwards.
    _hydra_row("intelmpi", "Intel MPI", markers=("I_MPI_MPIRUN",)),
    # Also what `srun --mpi=pmi2` looks like; the local rank is then Slurm's.
    _hydra_row("mpich", "MPICH"),
    # After the MPI launchers: `torchmn run` clears their variables (see `cleared`), so where both are set,
    # one of our ranks started an mpiexec. Before Slurm, whose variables stay for the user's script.
    _torch_row("torchmn", "torchmn run", marker=RUN_MARKER),
    # A step of one task is mostly a shell (`srun --pty bash`): it needs no MPI, and an MPI that was built
    # without Slurm's PMI would end the process in MPI_Init.
    Launcher(
        "slurm",
        "Slurm's srun",
        "mpi",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        markers=("SLURM_STEP_ID",),
        alone="solo",
    ),
    # torch's env:// variables, set by hand or by a container. Last, because they are the usual leftovers.
    _torch_row("env", "RANK and WORLD_SIZE", alone="solo"),
)

NO_LAUNCHER = Launch("none", "solo", rank=0, size=1, local_rank=0)

# Batch scripts and interactive allocations are steps too, numbered from here upwards. Their SLURM_PROCID is 0
# and their SLURM_NTASKS that of the whole job, but they are one process, which no srun started.
FIRST_RESERVED_SLURM_STEP = 0xFFFFFFF0

# What launchers set beside the table's variables. Users' own settings (*_MCA_*) are no part of it.
LAUNCHER_PREFIXES = (
    *("PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_WORLD_", "MV2_COMM_WORLD_"),
    "TORCHELASTIC_",
)


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """This process's place as its launcher states it; `NO_LAUNCHER` where there is none.

    Raises LaunchError, naming the variables, when they are malformed or contradict each other.
    """
    for launcher in LAUNCHERS:
        if _applies(launcher, environ):
            return _read(launcher, environ)
    return NO_LAUNCHER


def cleared(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environ` without what launchers told this process: the environment in which to start new ranks.

    Slurm's variables stay: scripts read them, and the new ranks' launcher stands before Slurm in the table.
    """
    told = {
        name
        for row in LAUNCHERS
        for name in (row.rank, *row.size, *row.local_rank, *row.markers, *row.needs)
        if not name.startswith("SLURM_")
    }
    return {
        name: value
        for name, value in environ.items()
        if name not in told and (not name.startswith(LAUNCHER_PREFIXES) or "_MCA_" in name)
    }


def _applies(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    if not all(environ.get(name) for name in (launcher.rank, *launcher.markers)):
        return False
    return launcher.name != "slurm" or _is_step_of_srun(environ["SLURM_STEP_ID"])


def _is_step_of_srun(step: str) -> bool:
    return step.isdecimal() and int(step) < FIRST_RESERVED_SLURM_STEP


def _read(launcher: Launcher, environ: Mapping[str, str]) -> Launch:
    size_name = next((name for name in launcher.size if environ.get(name)), None)
    if size_name is None:
        raise LaunchError(
            f"{launcher.title}: {launcher.rank}={environ[launcher.rank]} is set, but not"
            f" {' or '.join(launcher.size)}. Start the script with a launcher that sets both,"
            f" or unset {launcher.rank} to run one process."
        )
    rank = _number(launcher, launcher.rank, environ)
    size = _number(launcher, size_name, environ)
    if rank >= size:
        raise _contradiction(launcher, f"{launcher.rank}={rank}", f"{size_name}={size}")
    if size == 1 and launcher.alone:
        return Launch(launcher.name, launcher.alone, rank=0, size=1, local_rank=0)
    missing = [name for name in launcher.needs if not environ.get(name)]
    if missing:
        raise LaunchError(
            f"{launcher.title}: {launcher.rank}={rank} and {size_name}={size} are set, but not"
            f" {' and '.join(missing)}, so the ranks can not find each other. Set them to rank 0's address"
            f" and a free port there, or unset {launcher.rank} to run one process."
        )
    local_name = next((name for name in launcher.local_rank if environ.get(name)), None)
    local_rank = None if local_name is None else _number(launcher, local_name, environ)
    if local_rank is not None and local_rank >= size:
        raise _contradiction(launcher, f"{local_name}={local_rank}", f"{size_name}={size}")
    return Launch(launcher.name, launcher.transport, rank, size, local_rank)


def _number(launcher: Launcher, name: str, environ: Mapping[str, str]) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise LaunchError(
            f"{launcher.title}: {name} must be a whole number, 0 or larger, but is {text!r}. Correct it or unset it."
        )
    return int(text)


def _contradiction(launcher: Launcher, smaller: str, larger: str) -> LaunchError:
    return LaunchError(
        f"{launcher.title}: {smaller} must be smaller than {larger}."
        " Variables of two launchers may be mixed: unset those that do not belong to this job."
    )
