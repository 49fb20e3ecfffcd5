"""Checks of this machine: environment variables, host name, cores, temporary files, shared memory."""

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
from torchmn.communicators.launchers import pmi
from torchmn.communicators.launchers.environment import NO_LAUNCHER, detect
from torchmn.errors import LaunchError

MEGABYTE = 2**20
SHARED_MEMORY = Path("/dev/shm")


def launcher_variables(environ: Mapping[str, str] = os.environ) -> Finding:
    """Checks for variables of a launcher in this shell, which would make a script one of several ranks."""
    check = "launcher variables"
    try:
        launch = detect(environ)
    except LaunchError as error:
        return fail(check, str(error), "unset these variables, or start the script with its launcher")
    if launch == NO_LAUNCHER:
        return ok(check, "none set: `python script.py` runs on one rank")
    found = f"rank {launch.rank} of {launch.size or 'an unknown number'}, from the variables of {launch.name}"
    if launch.size == 1 or pmi.offered(environ):  # srun has started this process
        return ok(check, found)
    return warn(
        check,
        f"a script started here would be {found}",
        "if no launcher is running, unset them, or use `torchmn run`, which ignores them",
    )


def host_name() -> Finding:
    """Checks that this host's name has an address of this host, which other hosts and gloo rely on."""
    check, name = "host name", socket.gethostname()
    advice = f"add a line '<address of this host> {name}' to /etc/hosts, here and on the other hosts"
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        return warn(check, f"{name} has no address ({error})", advice)
    try:
        with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return warn(check, f"{name} is {address}, which is not an address of this machine", advice)
    return ok(check, f"{name} is {address}")


def cores_and_threads(environ: Mapping[str, str] = os.environ) -> Finding:
    """Checks that OMP_NUM_THREADS, if set, fits the usable cores."""
    check, cores, installed = "cores and threads", usable_cores(), os.cpu_count() or 1
    found = f"{cores} cores" + (f" of {installed}" if cores != installed else "")
    threads = environ.get("OMP_NUM_THREADS")
    if not threads:
        return ok(
            check, f"{found}; `torchmn run` divides them among ranks; with mpiexec set OMP_NUM_THREADS to cores / ranks"
        )
    if not threads.isdecimal() or not 1 <= int(threads) <= cores:
        return warn(
            check,
            f"{found}, but OMP_NUM_THREADS={threads}",
            "set it to cores / ranks: more threads than cores slow each other down",
        )
    return ok(check, f"{found}, OMP_NUM_THREADS={threads}: room for {cores // int(threads)} ranks")


def temporary_files() -> Finding:
    """Checks the directory in which launchers create sockets and pipes."""
    return _writable(
        "temporary files", Path(tempfile.gettempdir()), 100, "free some space, or set TMPDIR to another directory"
    )


def shared_memory() -> Finding:
    """Checks the shared memory through which ranks of one host exchange messages."""
    check = "shared memory"
    if not sys.platform.startswith("linux"):
        return ok(check, "not checked on this system")
    return _writable(check, SHARED_MEMORY, 128, "start the container with --shm-size=1g, or --ipc=host")


def _writable(check: str, directory: Path, megabytes: int, advice: str) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(directory).free // MEGABYTE
    except OSError as error:
        return fail(check, f"{directory} is not writable ({error.strerror})", advice)
    if free < megabytes:
        return warn(check, f"{directory} has only {free} MB free", advice)
    return ok(check, f"{directory} is writable, {free} MB free")
