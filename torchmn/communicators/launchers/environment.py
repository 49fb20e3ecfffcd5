"""Detects the launcher that started this process, by a table of environment variables.

Imports neither torch nor MPI, because it is used before they are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torchmn.errors import LaunchError

LauncherTransport = Literal["mpi", "torch", "solo"]


@dataclass(frozen=True)
class Launcher:
    """One row of the table: the variables that a launcher sets for each process.

    The row applies if `rank` and every variable of `markers` are set (an empty value counts as not set).

    Attributes:
        name, title: for code, and for messages.
        transport: of the ranks.
        rank: the variable of the rank.
        size, local_rank, local_size: alternative variables, best first.
        markers: variables that only this launcher sets.
        needs: variables without which the transport cannot start.
        alone: the transport of a single rank, if it is another one.
        sets_size: whether one of `size` is always set.
    """

    name: str
    title: str
    transport: LauncherTransport
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    markers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    alone: LauncherTransport | None = None
    local_size: tuple[str, ...] = ()
    sets_size: bool = True


@dataclass(frozen=True)
class Launch:
    """Values of the launcher's variables. `size` and `local_rank` are None if the launcher does not set them."""

    name: str
    transport: LauncherTransport
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int = 1  # processes of the job on this host; 1 if the launcher does not set it

    @property
    def min_size(self) -> int:
        """The smallest number of processes that the launcher can have started, this one included."""
        return self.size or max(self.rank + 1, self.local_size)

    @property
    def may_be_several(self) -> bool:
        """Whether the job may have several processes: False if the size is known to be 1."""
        return self.size is None or self.size > 1

    @property
    def title(self) -> str:
        """The launcher's name in messages."""
        return next((row.title for row in LAUNCHERS if row.name == self.name), self.name)


# `torchmn run` sets these for gloo ranks, besides the variables of torchrun: a marker, and the file of the store.
RUN_MARKER = "TORCHMN_RUN"
STORE_VARIABLE = "TORCHMN_STORE"
# It sets this one for ranks of MPI: it reports those that fail.
REPORTS_EXITS = "TORCHMN_RUN_REPORTS_EXITS"


def _torch_row(name: str, title: str, marker: str | None = None, alone: LauncherTransport | None = None) -> Launcher:
    markers = (marker,) if marker else ()
    rendezvous = ("MASTER_ADDR", "MASTER_PORT")
    return Launcher(
        name, title, "torch", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), markers, needs=rendezvous, alone=alone
    )


def _world_row(name: str, title: str, prefix: str) -> Launcher:
    return Launcher(name, title, "mpi", f"{prefix}_RANK", (f"{prefix}_SIZE",), (f"{prefix}_LOCAL_RANK",))


def _mpi_row(name: str, title: str, rank: str, size: str = "", local_rank: str = "", local_size: str = "") -> Launcher:
    """Returns the row of an MPI launcher that sets `rank`. If `size` is not set, MPI has the number of processes."""
    sizes, local_ranks, local_sizes = ((name,) if name else () for name in (size, local_rank, local_size))
    return Launcher(name, title, "mpi", rank, sizes, local_ranks, local_size=local_sizes, sets_size=False)


def _hydra_row(name: str, title: str, markers: tuple[str, ...] = ()) -> Launcher:
    return Launcher(name, title, "mpi", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "SLURM_LOCALID"), markers)


# The first row that applies is used: inner launchers must precede those that start them.
LAUNCHERS = (
    # torchrun first: clusters start one torchrun per host with mpiexec or srun, and its workers inherit the
    # outer launcher's variables. Only torchrun sets its marker; a container's leftover RANK is not enough.
    _torch_row("torchrun", "torchrun", marker="TORCHELASTIC_RUN_ID"),
    # MPI launchers before Slurm: in an allocation they start their daemons with srun, so their ranks also
    # carry the SLURM_PROCID of a daemon, which numbers hosts and not ranks. Open MPI before Hydra: Slurm's
    # PMI plugins leave PMI_RANK=0 on an mpirun that srun started, and Hydra never sets OMPI_*.
    _world_row("openmpi", "Open MPI", prefix="OMPI_COMM_WORLD"),
    _world_row("mvapich", "MVAPICH2", prefix="MV2_COMM_WORLD"),
    _world_row("mvapich3", "MVAPICH", prefix="MVP_COMM_WORLD"),
    _mpi_row("mpirun_rsh", "MVAPICH's mpirun_rsh", "MPIRUN_RANK", "MPIRUN_NPROCS"),
    # Intel MPI's launcher is Hydra with another marker. I_MPI_ROOT is not one: Intel's set-up scripts set it,
    # whichever MPI is used afterwards.
    _hydra_row("intelmpi", "Intel MPI", markers=("I_MPI_MPIRUN",)),
    # Also `srun --mpi=pmi2`, where the local rank is Slurm's.
    _hydra_row("mpich", "MPICH"),
    # mpiexec -pmi-port sets the rank and the address of a server that has the other values.
    _mpi_row("pmi_port", "MPICH with -pmi-port", "PMI_ID", "", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Launchers of machines and batch systems. Some set variables of the rows above, too, but not in all versions.
    _mpi_row("pals", "PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    _mpi_row("jsm", "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    _mpi_row("alps", "aprun", "ALPS_APP_PE"),
    _mpi_row("poe", "IBM's POE", "MP_CHILD", "MP_PROCS"),
    _mpi_row("nec", "NEC MPI", "MPIRANK", "MPISIZE"),
    _mpi_row("platform", "Platform MPI", "MPI_RANKID", "MPI_NRANKS"),
    _mpi_row("mpt", "HPE MPT", "MPT_MPI_RANK"),
    # PRRTE's prterun and prun, and other PMIx servers. Slurm is one, too, and has another row.
    _mpi_row("pmix", "a PMIx launcher (prterun, prun)", "PMIX_RANK"),
    # horovodrun over gloo starts ranks that MPI does not connect: they raise an error.
    _mpi_row("horovod", "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    # After the MPI launchers: `torchmn run` clears their variables (see `cleared`), so if both are set, one of its
    # ranks started an mpiexec. Before Slurm, whose variables are kept for the user's script.
    _torch_row("torchmn", "torchmn run", marker=RUN_MARKER),
    # A step of one task is mostly a shell (`srun --pty bash`), which needs no MPI. An MPI library without Slurm's PMI
    # would end the process in MPI_Init.
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
    # As with Slurm: a job of one task is mostly a batch script, or a shell.
    Launcher(
        "flux",
        "Flux",
        "mpi",
        rank="FLUX_TASK_RANK",
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        alone="solo",
        sets_size=False,
    ),
    # torch's env:// variables, set by hand or by a container. Last, because they are often left over.
    _torch_row("env", "RANK and WORLD_SIZE", alone="solo"),
)

NO_LAUNCHER = Launch("none", "solo", rank=0, size=1, local_rank=0)

# Batch scripts and interactive allocations are steps, too, numbered from here upwards. Their SLURM_PROCID is 0 and
# their SLURM_NTASKS that of the whole job, but they are one process, which srun did not start.
FIRST_RESERVED_SLURM_STEP = 0xFFFFFFF0

# Prefix of the namespaces of Slurm's PMIx plugin. Its steps are detected by Slurm's variables, which include the size.
SLURM_PMIX = "slurm.pmix."

# Prefixes of variables that launchers set besides those of the table. Settings of users (*_MCA_*) are kept.
LAUNCHER_PREFIXES = (
    *("PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_WORLD_", "MV2_COMM_WORLD_"),
    *("MVP_COMM_WORLD_", "PALS_", "JSM_NAMESPACE_", "ALPS_APP_", "TORCHELASTIC_", STORE_VARIABLE, REPORTS_EXITS),
)


def detect(environ: Mapping[str, str] = os.environ, only: LauncherTransport | None = None) -> Launch:
    """Returns the values of this process's launcher; `NO_LAUNCHER` if there is none.

    Args:
        environ: the environment variables.
        only: consider only launchers for this transport.

    Raises:
        LaunchError: variables are malformed or contradict each other; the message names them.
    """
    for launcher in LAUNCHERS:
        if only in (None, launcher.transport) and _applies(launcher, environ):
            return _read(launcher, environ)
    return NO_LAUNCHER


def cleared(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns `environ` without the variables of launchers, for starting new ranks.

    Slurm's variables are kept: scripts read them, and the launcher of the new ranks precedes Slurm in the table.
    """
    names = {
        name
        for row in LAUNCHERS
        for name in (row.rank, *row.size, *row.local_rank, *row.local_size, *row.markers, *row.needs)
        if not name.startswith("SLURM_")
    }
    return {
        name: value
        for name, value in environ.items()
        if name not in names and (not name.startswith(LAUNCHER_PREFIXES) or "_MCA_" in name)
    }


def _applies(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    if not all(environ.get(name) for name in (launcher.rank, *launcher.markers)):
        return False
    if launcher.name == "pmix":
        of_slurm = environ.get("PMIX_NAMESPACE", "").startswith(SLURM_PMIX)
        return not (of_slurm and environ.get("SLURM_STEP_ID"))
    return launcher.name != "slurm" or is_step_of_srun(environ["SLURM_STEP_ID"])


def is_step_of_srun(step: str) -> bool:
    """Returns whether a SLURM_STEP_ID is that of tasks which srun started."""
    return step.isdecimal() and int(step) < FIRST_RESERVED_SLURM_STEP


def _read(launcher: Launcher, environ: Mapping[str, str]) -> Launch:
    size_name = _first_set(launcher.size, environ)
    if size_name is None and launcher.sets_size:
        raise LaunchError(
            f"{launcher.title}: {launcher.rank}={environ[launcher.rank]} is set, but not"
            f" {' or '.join(launcher.size)}. Start the script with a launcher that sets both,"
            f" or unset {launcher.rank} to run one process."
        )
    rank = _number(launcher, launcher.rank, environ)
    size = None if size_name is None else _number(launcher, size_name, environ)
    if size is not None and rank >= size:
        raise _contradiction(launcher, f"{launcher.rank}={rank}", f"{size_name}={size}")
    if size == 1 and launcher.alone:
        return Launch(launcher.name, launcher.alone, rank=0, size=1, local_rank=0)
    missing = [name for name in launcher.needs if not environ.get(name)]
    if missing:
        raise LaunchError(
            f"{launcher.title}: {launcher.rank}={rank} and {size_name}={size} are set, but not"
            f" {' and '.join(missing)}, so the ranks cannot find each other. Set them to rank 0's address"
            f" and a free port there, or unset {launcher.rank} to run one process."
        )
    local_name = _first_set(launcher.local_rank, environ)
    local_rank = None if local_name is None else _number(launcher, local_name, environ)
    if size is not None and local_rank is not None and local_rank >= size:
        raise _contradiction(launcher, f"{local_name}={local_rank}", f"{size_name}={size}")
    local_size_name = _first_set(launcher.local_size, environ) if size is None else None
    local_size = _number(launcher, local_size_name, environ) if local_size_name else 1
    return Launch(launcher.name, launcher.transport, rank, size, local_rank, local_size)


def _first_set(names: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
    return next((name for name in names if environ.get(name)), None)


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
