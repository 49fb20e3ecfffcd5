"""PMI: the protocol by which MPI_Init asks the launcher for the other ranks. Slurm speaks several, each MPI one or two.

Imports neither torch nor MPI, because it is used before they are loaded.
"""

from __future__ import annotations

import os
import re
import select
import socket
from collections.abc import Mapping

from torchmn.communicators.launchers.environment import SLURM_PMIX, detect, is_step_of_srun

FITTING = {"Open MPI": "pmix", "MPICH": "pmi2", "Intel": "pmi2", "MVAPICH": "pmi2"}
"""For each family of MPI libraries, named as in their version texts, the type of `srun --mpi=TYPE`."""


def fitting(library: str) -> str | None:
    """Returns the type of `srun --mpi=TYPE` for an MPI library with this version text; None if it is unknown."""
    if _supports_pmix(library):
        return "pmix"
    return next((kind for family, kind in FITTING.items() if family in library), None)


def offered(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the type of `srun --mpi=TYPE` that started this process; None if srun did not start it."""
    launcher = detect(environ, only="mpi").name
    if launcher == "slurm":
        return "pmix" if environ.get("PMIX_NAMESPACE", "").startswith(SLURM_PMIX) else "none"
    of_hydra = environ.get("MPI_LOCALRANKID")  # inside of a step, too: mpiexec starts its daemons with srun
    is_pmi2 = launcher == "mpich" and not of_hydra and is_step_of_srun(environ.get("SLURM_STEP_ID", ""))
    return "pmi2" if is_pmi2 else None


def srun_problem(library: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns why ranks with this MPI library do not find each other under this `srun`, and what to do; else None.

    Args:
        library: the library's version text.
        environ: the environment variables.
    """
    kind, fits = offered(environ), fitting(library)
    if kind is None or fits is None or kind == fits:
        return None
    name = next(family for family in FITTING if family in library)
    return (
        f"srun started the ranks with --mpi={kind}, and {name} needs another type: use `srun --mpi={fits}` (`srun "
        "--mpi=list` shows what this Slurm has), or mpiexec instead of srun inside of sbatch or salloc"
    )


def unusable(library: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns why MPI_Init of this library would end the process, and what to do; None if it would not."""
    # The text of an MPICH without that line does not show which protocols it has.
    if offered(environ) == "pmix" and "MPICH configure" in library:
        return srun_problem(library, environ)
    return None


def used_up(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns why MPI_Init would fail because an MPI program has ended in this step before, and what to do; else None.

    The launcher serves one MPI_Init and MPI_Finalize of each rank, and then closes its end of PMI_FD.
    """
    if not environ.get("PMI_FD", "").isdecimal():
        return None
    descriptor = int(environ["PMI_FD"])
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            ready = select.select([connection], [], [], 0)[0]
            if not ready or connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return None
    except ConnectionError:
        pass  # as closed
    except OSError:  # not a socket, or not open: MPI reports it
        return None
    start = "srun" if offered(environ) else "mpiexec"
    return (
        f"another MPI program has already run and ended under this {start} (as with `{start} bash -c 'python a.py; "
        f"python b.py'`), and {start} connects ranks only once: start each program with its own {start}"
    )


def _supports_pmix(library: str) -> bool:
    return "MPICH" in library and bool(re.search(r"--with-pmi(x=|=pmix)", library))
