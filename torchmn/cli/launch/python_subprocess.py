"""Runs Python code in a subprocess: for imports that are slow, or that may crash the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from torchmn.errors import LaunchError

WITHOUT_WORKING_DIRECTORY = "import sys; sys.path = [directory for directory in sys.path if directory]"
"""First statement of `python -c` programs: files in the working directory must not shadow standard modules."""


def output_lines(program: str, environ: Mapping[str, str], seconds: float) -> list[str]:
    """Returns the lines that the Python code `program` prints.

    Raises:
        LaunchError: if it fails, with the last line of its standard error, or does not end within `seconds`.
    """
    try:
        result = subprocess.run(
            [sys.executable, "-c", f"{WITHOUT_WORKING_DIRECTORY}\n{program}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=dict(environ),
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"no answer within {seconds:g} s") from error
    if result.returncode:
        raise LaunchError((result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1])
    return result.stdout.splitlines()
