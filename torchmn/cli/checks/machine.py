"""Rungs about this machine: the shell's variables, the host's name, cores, disks."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torchmn.cli.checks.finding import Finding, fail, ok, warn
from torchmn.cli.launch.job import usable_cores
from torchmn.communicators.launchers.environment import NO_LAUNCHER, detect
from torchmn.errors import LaunchError

MEGABYTE = 2**20
SHARED_MEMORY = Path("/dev/shm")


def launcher_variables(environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether a launcher's variables are set in this shell, where a script would believe them."""
    rung = "launcher variables"
    try:
        launch = detect(environ)
    except LaunchError as error:
        return fail(rung, str(error), "unset the variables named, or start your script with its launcher")
    if launch == NO_LAUNCHER:
        return ok(rung, "none set: `python script.py` is a world of one")
    place = f"rank {launch.rank} of {launch.size or 'a number that MPI has'}, as {launch.name} says"
    if launch.size == 1:
        return ok(rung, place)
    return warn(
        rung,
        f"a script started here would be {place}",
        "if no launcher runs, these are leftovers: unset them, or use `torchmn run`, which ignores them",
    )


def host_name() -> Finding:
    """Whether this host's name leads back to this host, which other hosts and gloo rely on."""
    rung, name = "host name", socket.gethostname()
    advice = f"add a line '<address of this host> {name}' to /etc/hosts, here and on the other hosts"
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        return warn(rung, f"{name} has no address ({error})", advice)
    try:
        with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return warn(rung, f"{name} is {address}, which is no address of this machine", advice)
    return ok(rung, f"{name} is {address}")


def cores_and_threads(environ: Mapping[str, str] = os.environ) -> Finding:
    """The cores that ranks may use, and whether threads are set to fit them."""
    rung, cores, installed = "cores and threads", usable_cores(), os.cpu_count() or 1
    found = f"{cores} cores" + (f" of {installed}" if cores != installed else "")
    threads = environ.get("OMP_NUM_THREADS")
    if not threads:
        return ok(rung, f"{found}; `torchmn run` divides them; with mpiexec set OMP_NUM_THREADS to cores / ranks")
    if not threads.isdecimal() or not 1 <= int(threads) <= cores:
        return warn(
            rung,
            f"{found}, but OMP_NUM_THREADS={threads}",
            "set it to cores / ranks: more threads than cores wait for each other",
        )
    return ok(rung, f"{found}, OMP_NUM_THREADS={threads}: room for {cores // int(threads)} ranks")


def temporary_files() -> Finding:
    """Whether launchers can write where they keep their sockets and pipes."""
    return _writable(
        "temporary files", Path(tempfile.gettempdir()), 100, "make room, or set TMPDIR to a place with room"
    )


def shared_memory() -> Finding:
    """Whether ranks of one host can share memory, over which they send fastest."""
    rung = "shared memory"
    if not sys.platform.startswith("linux"):
        return ok(rung, "not looked at on this system")
    return _writable(rung, SHARED_MEMORY, 128, "in a container: start it with --shm-size=1g, or --ipc=host")


def _writable(rung: str, directory: Path, megabytes: int, advice: str) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(directory).free // MEGABYTE
    except OSError as error:
        return fail(rung, f"{directory} can not be written ({error.strerror})", advice)
    if free < megabytes:
        return warn(rung, f"{directory} has only {free} MB left", advice)
    return ok(rung, f"{directory} can be written, {free} MB free")
