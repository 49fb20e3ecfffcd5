"""Checks of the installed software: Python, torch, the MPI launcher, the MPI library that mpi4py loads, GPUs."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchmn.cli.checks.finding import Finding, fail, ok, warn
from torchmn.cli.launch.mpi_installation import (
    LIBRARY_VARIABLE,
    Installation,
    LoadedLibrary,
    find_mpiexec,
    fits,
    identify,
    library_environment,
    loaded_library,
)
from torchmn.cli.launch.python_subprocess import output_lines
from torchmn.communicators.launchers.environment import cleared
from torchmn.errors import LaunchError

OLDEST_PYTHON = (3, 10)
INSTALL_MPI = "install one with: pip install mpich; until then `torchmn run` uses gloo"

# Run in a subprocess: a broken torch may crash the process that imports it.
TORCH_QUERY = """
import json, torch
import torch.distributed as dist
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
    "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else [],
}))
"""


def python() -> Finding:
    """Checks the version of Python."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return fail("python", found, "TorchMN needs Python 3.10 or newer")
    return ok("python", found)


def torch(facts: dict[str, Any]) -> Finding:
    """Checks that torch can be imported, and includes gloo."""
    if "error" in facts:
        return fail(
            "torch", f"import torch fails: {facts['error']}", "reinstall it: pip install --force-reinstall torch"
        )
    if not facts["gloo"]:
        return warn("torch", f"{facts['version']} without gloo", "ranks can use MPI only; official wheels include gloo")
    return ok("torch", f"{facts['version']}, with gloo")


def gpu(facts: dict[str, Any]) -> Finding:
    """Checks the GPUs visible to torch, and that it includes nccl for them."""
    if facts.get("gpus"):
        names = ", ".join(sorted(set(facts["gpus"])))
        found = f"{len(facts['gpus'])} ({names}), CUDA {facts['cuda']}"
        if facts["nccl"]:
            return ok("gpu", f"{found}, with nccl")
        return warn(
            "gpu", f"{found}, without nccl", "messages between GPUs go through the CPU: install a torch with nccl"
        )
    if facts.get("cuda"):
        return warn(
            "gpu",
            f"none visible, though torch is built for CUDA {facts['cuda']}",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    return ok("gpu", "none, and torch is built for CPUs: ranks use mpi or gloo")


def torch_facts() -> dict[str, Any]:
    """Returns the version and features of torch, or an `error`."""
    try:
        return json.loads(output_lines(TORCH_QUERY, cleared(), seconds=120)[-1])
    except LaunchError as error:
        return {"error": str(error)}


class MPI:
    """The checks of MPI. Afterwards `installation` is the usable one and `loaded` mpi4py's library; or None."""

    def __init__(self) -> None:
        self.installation: Installation | None = None
        self.loaded: LoadedLibrary | None = None

    def findings(self) -> Iterator[Finding]:
        """Runs the checks, up to the first problem."""
        try:
            installation = self._launcher()
        except LaunchError as error:
            yield warn("mpiexec", str(error), INSTALL_MPI)
            return
        yield ok("mpiexec", f"{installation.title} at {installation.mpiexec}")
        try:
            loaded = loaded_library({**cleared(), **library_environment(installation)})
        except LaunchError as error:
            advice = f"set {LIBRARY_VARIABLE} to the library of {installation.title}, or reinstall mpi4py"
            yield fail("mpi4py", str(error), advice)
            return
        self.loaded = loaded
        yield ok("mpi4py", f"{loaded.mpi4py} loads {loaded.version}" + (f" from {loaded.path}" if loaded.path else ""))
        match = self._match(installation, loaded)
        yield match
        if match.level != "FAIL":
            self.installation = installation

    def _launcher(self) -> Installation:
        mpiexec = find_mpiexec()
        if mpiexec is None:
            raise LaunchError("not found beside this Python or on the PATH")
        return identify(mpiexec)

    def _match(self, installation: Installation, loaded: LoadedLibrary) -> Finding:
        check = "mpiexec fits mpi4py"
        if not fits(installation, loaded):
            return fail(
                check,
                f"the launcher is {installation.title}, the library {loaded.version}: each rank would be rank 0 of 1",
                f"install one MPI only; or set {LIBRARY_VARIABLE} to the launcher's library; or, if mpi4py"
                f" was built for one MPI, rebuild it: pip install --force-reinstall --no-binary mpi4py mpi4py",
            )
        library = installation.library
        if library and loaded.path and library.resolve() != Path(loaded.path).resolve():
            return warn(
                check,
                f"mpi4py loads {loaded.path}, the launcher belongs to {library}",
                f"there are two copies of {installation.flavour.title}: unset {LIBRARY_VARIABLE}, or remove one",
            )
        return ok(check, f"both are {installation.flavour.title}")
