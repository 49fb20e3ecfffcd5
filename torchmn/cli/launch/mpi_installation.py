"""Finds the MPI installation of this machine: its launcher, its library, and the library that mpi4py loads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmn.cli.launch.python_subprocess import output_lines
from torchmn.communicators.launchers.environment import cleared
from torchmn.errors import LaunchError

MPIEXEC_VARIABLE = "TORCHMN_MPIEXEC"
LIBRARY_VARIABLE = "MPI4PY_LIBMPI"


@dataclass(frozen=True)
class Flavour:
    """A family of MPI implementations, recognised by regular expressions for the versions that they print."""

    name: str
    title: str
    launcher_pattern: str
    library_pattern: str
    libraries: tuple[str, ...]
    rank_variable: str


# MPICH and Intel MPI share launcher and binary interface, so each can start ranks of the other.
HYDRA_LIBRARIES = ("libmpi.so.12", "libmpich.so.12", "libmpi.12.dylib")
OPEN_MPI_LIBRARIES = ("libmpi.so.40", "libmpi.40.dylib")
FLAVOURS = (
    Flavour("openmpi", "Open MPI", "Open ?MPI|OpenRTE", "Open MPI", OPEN_MPI_LIBRARIES, "OMPI_COMM_WORLD_RANK"),
    Flavour("intelmpi", "Intel MPI", r"Intel\(R\) MPI", "MPICH|Intel", HYDRA_LIBRARIES, "PMI_RANK"),
    Flavour("mpich", "MPICH", "HYDRA", "MPICH|Intel|MVAPICH", HYDRA_LIBRARIES, "PMI_RANK"),
)


@dataclass(frozen=True)
class Installation:
    """A launcher and, if found, the library installed with it."""

    mpiexec: Path
    flavour: Flavour
    version: str
    library: Path | None

    @property
    def title(self) -> str:
        return f"{self.flavour.title} {self.version}".strip()


def find_mpiexec(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the launcher to use, or None.

    The first of: the one in TORCHMN_MPIEXEC, the one beside the library in MPI4PY_LIBMPI, the one beside this Python,
    the one on the PATH.
    """
    named = environ.get(MPIEXEC_VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise LaunchError(f"{MPIEXEC_VARIABLE}={named} is not an executable")
        return Path(found)
    library = environ.get(LIBRARY_VARIABLE)
    beside_library = [str(Path(library).parent.parent / "bin")] if library else []
    for directory in (*beside_library, str(Path(sys.executable).parent), environ.get("PATH", os.defpath)):
        for name in ("mpiexec", "mpirun", "mpiexec.hydra"):
            if found := shutil.which(name, path=directory):
                return Path(found)
    return None


def identify(mpiexec: Path) -> Installation:
    """Returns the installation of a launcher, recognised by the output of `mpiexec --version`."""
    try:
        result = subprocess.run(
            [mpiexec, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            env=cleared(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{mpiexec} --version failed: {error}") from error
    output = result.stdout + result.stderr
    for flavour in FLAVOURS:
        if re.search(flavour.launcher_pattern, output):
            version = re.search(r"\d+\.\d+(\.\d+)*\w*", output)
            return Installation(mpiexec, flavour, version.group() if version else "", _library(mpiexec, flavour))
    raise LaunchError(
        f"{mpiexec} is not the mpiexec of MPICH, Intel MPI or Open MPI: --version printed {output.strip()[:200]!r}"
    )


def _library(mpiexec: Path, flavour: Flavour) -> Path | None:
    return next((path for path in _library_paths(mpiexec, flavour) if path.exists()), None)


def _library_paths(mpiexec: Path, flavour: Flavour) -> Iterator[Path]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for launcher in (mpiexec, mpiexec.resolve()):
        for directory in ("lib", f"lib/{multiarch}", "lib64", "lib/release"):
            for name in flavour.libraries:
                yield launcher.parent.parent / directory / name


def library_environment(installation: Installation, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variable that makes mpi4py load the launcher's library, unless the user has set it."""
    if installation.library is None or environ.get(LIBRARY_VARIABLE):
        return {}
    return {LIBRARY_VARIABLE: str(installation.library)}


MPI4PY_QUERY = """
import mpi4py, sys
mpi4py.rc.initialize = False
from mpi4py import MPI
paths = {line.split()[-1] for line in open("/proc/self/maps")} if sys.platform == "linux" else set()
print(mpi4py.__version__)
print(min((path for path in paths if "/libmpi" in path), default=""))
print(MPI.Get_library_version())
"""


@dataclass(frozen=True)
class LoadedLibrary:
    """The MPI library that mpi4py loads: its path ("" if unknown) and the version that it reports."""

    mpi4py: str
    path: str
    version: str


def loaded_library(environ: Mapping[str, str]) -> LoadedLibrary:
    """Returns the library that mpi4py loads in a process with this environment; raises a LaunchError if none."""
    try:
        version, path, description, *_ = output_lines(MPI4PY_QUERY, environ, seconds=60)
    except LaunchError as error:
        raise LaunchError(f"mpi4py cannot load an MPI library ({error})") from error
    return LoadedLibrary(version, path, " ".join(description.partition(",")[0].split()))


def usable(environ: Mapping[str, str] = os.environ) -> Installation:
    """Returns the installation if its launcher fits the library that mpi4py loads; otherwise raises a LaunchError."""
    mpiexec = find_mpiexec(environ)
    if mpiexec is None:
        raise LaunchError("there is no mpiexec beside this Python or on the PATH")
    installation = identify(mpiexec)
    loaded = loaded_library({**cleared(environ), **library_environment(installation, environ)})
    if not fits(installation, loaded):
        raise LaunchError(
            f"{mpiexec} belongs to {installation.title}, but mpi4py loads {loaded.version!r}"
            f" from {loaded.path or 'an unknown path'}: each rank would be rank 0 of 1"
        )
    return installation


def fits(installation: Installation, loaded: LoadedLibrary) -> bool:
    """Returns whether ranks started by this launcher find each other with this library."""
    return re.search(installation.flavour.library_pattern, loaded.version) is not None
