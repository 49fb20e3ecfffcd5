"""Fixtures of the command's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def python_without_mpi(tmp_path) -> str:
    """A virtual environment with all packages of this one, but neither mpiexec nor an MPI library."""
    home = tmp_path / "no-mpi"
    library = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    (home / "bin").mkdir(parents=True)
    library.mkdir(parents=True)
    interpreter = Path(sys.executable).resolve()
    (home / "bin" / "python").symlink_to(interpreter)
    (library / "site-packages").symlink_to(Path(pytest.__file__).parents[1])
    (home / "pyvenv.cfg").write_text(f"home = {interpreter.parent}{os.linesep}")
    return str(home / "bin" / "python")
