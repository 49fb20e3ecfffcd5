"""Job: the commands that start ranks on this machine, which are one mpiexec or, for gloo, one process per rank."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from torchmn.cli.launch import rank_process
from torchmn.cli.launch.mpi_installation import MPIEXEC_VARIABLE, Installation, library_environment, usable
from torchmn.communicators.launchers.addresses import LOOPBACK, loopback_interface
from torchmn.communicators.launchers.environment import REPORTS_EXITS, RUN_MARKER, STORE_VARIABLE, cleared
from torchmn.errors import LaunchError


@dataclass(frozen=True)
class Job:
    """`size` ranks of `command`."""

    size: int
    rank_variable: str
    """Environment variable in which a rank finds its number."""
    command: Sequence[str]
    starts: Sequence[tuple[Sequence[str], Mapping[str, str]]]
    """For each process to start, the arguments before the rank's command, and the environment."""
    reservation: AbstractContextManager = field(default_factory=nullcontext)
    """To be kept open while the job runs."""
    store_variable: str | None = None
    """Environment variable for the path of the file through which the ranks find each other."""

    def commands(self, directory: Path) -> list[tuple[list[str], dict[str, str]]]:
        """Returns arguments and environment of each process to start.

        Every rank runs `rank_process`, which runs the command with its output in the pipes in `directory`.
        """
        text = json.dumps(list(self.command), ensure_ascii=False)
        (directory / "command").write_text(text, encoding="utf-8", errors="surrogateescape")
        # -I -S: the wrapper starts fast and without the user's environment; the rank's interpreter has all of it.
        wrapper = [sys.executable, "-I", "-S", rank_process.__file__, str(directory), self.rank_variable]
        # The directory is private to this user, and is removed with the pipes.
        store = {self.store_variable: str(directory / "store")} if self.store_variable else {}
        return [([*start, *wrapper], {**environment, **store}) for start, environment in self.starts]


def job_for(transport: str | None, size: int, command: list[str], environment: dict[str, str]) -> Job:
    """Returns the job of `command` on `size` ranks; without a `transport`, over MPI if it is usable, else gloo."""
    if transport == "gloo":
        return gloo_job(size, command, environment)
    try:
        return mpi_job(usable(), size, command, environment)
    except LaunchError as error:
        if transport == "mpi" or os.environ.get(MPIEXEC_VARIABLE):
            raise LaunchError(f"{error}. See `torchmn doctor`, or use --transport gloo.") from error
        print(f"torchmn run: using gloo, because {error}. See `torchmn doctor`.", file=sys.stderr, flush=True)
        return gloo_job(size, command, environment)


def rank_environment(size: int, threads: int | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment of ranks: no variables of other launchers, unbuffered output, OMP_NUM_THREADS."""
    environment = {**cleared(environ), "PYTHONUNBUFFERED": "1"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    elif not environ.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, usable_cores() // size))
    return environment


def warn_few_cores(size: int) -> None:
    """Prints a warning if there are more ranks than cores, where ranks wait for each other's turn."""
    cores = usable_cores()
    if size > cores:
        text = (
            f"torchmn: {size} ranks share {cores} {'core' if cores == 1 else 'cores'}: results are the same, but slower"
        )
        print(text, file=sys.stderr, flush=True)


def usable_cores() -> int:
    """Returns the number of cores that this process may use; in a container or batch job not all of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def mpi_job(installation: Installation, size: int, command: Sequence[str], environment: Mapping[str, str]) -> Job:
    """Returns a job started by the installation's mpiexec; on this machine even inside a Slurm allocation.

    Ranks also get the variables of torchrun, for scripts that use torch.distributed. For TorchMN those of MPI count,
    which precede them in the table of launchers.
    """
    options, settings = mpiexec_options(installation)
    start = [str(installation.mpiexec), *options, "-n", str(size)]
    variables, reservation = torch_variables(size, environment)
    environment = {**environment, **library_environment(installation, environment), **settings, **variables}
    environment[REPORTS_EXITS] = "1"
    return Job(size, installation.flavour.rank_variable, command, [(start, environment)], reservation)


def mpiexec_options(installation: Installation) -> tuple[list[str], dict[str, str]]:
    """Returns the options and environment variables with which mpiexec starts any number of ranks on this machine."""
    if installation.flavour.name == "mpich":
        return ["-launcher", "fork", "-rmk", "user"], {}
    if installation.flavour.name == "intelmpi":
        return [], {"I_MPI_HYDRA_BOOTSTRAP": "fork", "I_MPI_PIN": "off"}
    # Open MPI would bind each rank with all its threads to one core, and refuse more ranks than cores. It looks for
    # the hosts of a batch system; since version 5 that part (PRRTE) has separate settings.
    family = "OMPI" if installation.version.startswith(("1.", "2.", "3.", "4.")) else "PRTE"
    settings = {f"{family}_MCA_ras": "^slurm", f"{family}_MCA_plm": "^slurm"}
    return ["--oversubscribe", "--bind-to", "none"], settings | allow_root()


def allow_root() -> dict[str, str]:
    """Returns the variables that let Open MPI run as root, the usual user in containers."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {}


def gloo_job(size: int, command: Sequence[str], environment: Mapping[str, str]) -> Job:
    """Returns a job that starts one process per rank, with torchrun's variables and TorchMN's marker.

    MASTER_ADDR and MASTER_PORT are for scripts that use torch.distributed themselves. TorchMN's ranks find each other
    through a file instead, because torch's TCP store accepts connections on all interfaces without authentication.
    """
    variables, reservation = torch_variables(size, environment)
    shared = {**environment, **variables, RUN_MARKER: "gloo"}
    starts = [([], {**shared, "RANK": str(rank)}) for rank in range(size)]
    return Job(size, "RANK", command, starts, reservation, STORE_VARIABLE)


def torch_variables(size: int, environment: Mapping[str, str]) -> tuple[dict[str, str], socket.socket]:
    """Returns torchrun's variables that are the same for all ranks, and the reservation of MASTER_PORT.

    `rank_process` adds RANK and LOCAL_RANK.
    """
    reservation = reserved_port()
    variables = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(reservation.getsockname()[1]),
    }
    interface = loopback_interface()
    if interface and not environment.get("GLOO_SOCKET_IFNAME"):
        # gloo would use the address of the host name, which in a container may belong to no local interface.
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables, reservation


def reserved_port() -> socket.socket:
    """Returns a socket that reserves a free port. It does not listen, so that torch's store on rank 0 can."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((LOOPBACK, 0))
    return reservation
