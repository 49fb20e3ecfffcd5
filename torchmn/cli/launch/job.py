"""The processes to start for a job on this machine: one mpiexec, or one process per rank for gloo."""

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
from torchmn.cli.launch.mpi_installation import Installation, library_environment
from torchmn.communicators.launchers.environment import RUN_MARKER, STORE_VARIABLE, cleared


@dataclass(frozen=True)
class Job:
    """`size` ranks of `command`. Each of `starts` is a program's arguments and environment.

    `held` is to be kept open while the job runs. `meets_in` is the variable that names the file where the ranks meet.
    """

    size: int
    rank_variable: str
    command: Sequence[str]
    starts: Sequence[tuple[Sequence[str], Mapping[str, str]]]
    held: AbstractContextManager = field(default_factory=nullcontext)
    meets_in: str | None = None

    def commands(self, directory: Path) -> list[tuple[list[str], dict[str, str]]]:
        """What to start, so that in every rank `rank_process` runs our command with the pipes in `directory`."""
        text = json.dumps(list(self.command), ensure_ascii=False)
        (directory / "command").write_text(text, encoding="utf-8", errors="surrogateescape")
        # -I -S: the wrapper loads nothing of the user's; his own interpreter follows, with all of it.
        wrapper = [sys.executable, "-I", "-S", rank_process.__file__, str(directory), self.rank_variable]
        # In a directory that only this user may enter, and that is removed with the pipes.
        meeting = {self.meets_in: str(directory / "store")} if self.meets_in else {}
        return [([*start, *wrapper], {**environment, **meeting}) for start, environment in self.starts]


def rank_environment(size: int, threads: int | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every rank finds in its environment: no older launcher, unbuffered output, a share of the cores."""
    environment = {**cleared(environ), "PYTHONUNBUFFERED": "1"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    elif not environ.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, usable_cores() // size))
    return environment


def usable_cores() -> int:
    """The cores that this process may use, which in a container or a batch job are not all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def mpi_job(installation: Installation, size: int, command: Sequence[str], environment: Mapping[str, str]) -> Job:
    """A job that the installation's mpiexec starts, on this machine also inside a Slurm allocation."""
    options, settings = mpiexec_options(installation)
    start = [str(installation.mpiexec), *options, "-n", str(size)]
    environment = {**environment, **library_environment(installation, environment), **settings}
    return Job(size, installation.flavour.rank_variable, command, [(start, environment)])


def mpiexec_options(installation: Installation) -> tuple[list[str], dict[str, str]]:
    """The arguments and settings with which this mpiexec starts ranks here, on whatever cores there are."""
    if installation.flavour.name == "mpich":
        return ["-launcher", "fork", "-rmk", "user"], {}
    if installation.flavour.name == "intelmpi":
        return [], {"I_MPI_HYDRA_BOOTSTRAP": "fork", "I_MPI_PIN": "off"}
    # Open MPI would bind each rank to one core, threads and all, and refuse more ranks than cores. It looks for
    # the hosts of a batch system; since version 5 that part (PRRTE) has settings of its own.
    family = "OMPI" if installation.version.startswith(("1.", "2.", "3.", "4.")) else "PRTE"
    settings = {f"{family}_MCA_ras": "^slurm", f"{family}_MCA_plm": "^slurm"}
    return ["--oversubscribe", "--bind-to", "none"], settings | allow_root()


def allow_root() -> dict[str, str]:
    """What lets Open MPI run for root, as whom everything runs in most containers."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {}


def gloo_job(size: int, command: Sequence[str], environment: Mapping[str, str]) -> Job:
    """A job of which each rank is a process of ours, with the variables that torchrun sets and our marker.

    MASTER_ADDR and MASTER_PORT are for the script's own use of torch.distributed: torch's store there listens on all
    interfaces, to everybody, so our ranks meet in a file.
    """
    reservation = reserved_port()
    shared = {
        **environment,
        RUN_MARKER: "gloo",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reservation.getsockname()[1]),
    }
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback and not environment.get("GLOO_SOCKET_IFNAME"):
        # gloo would take the address of the host's name, which in a container may be no address of ours.
        shared["GLOO_SOCKET_IFNAME"] = loopback
    starts = [([], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]
    return Job(size, "RANK", command, starts, held=reservation, meets_in=STORE_VARIABLE)


def reserved_port() -> socket.socket:
    """A socket that keeps a free port for rank 0. It does not listen, so that torch's store still may."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation
