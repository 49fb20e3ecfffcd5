"""Asking a Python process of its own what would be dangerous, or too slow, to find out in ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from torchmn.errors import LaunchError

WITHOUT_WORKING_DIRECTORY = "import sys; sys.path = [place for place in sys.path if place]"
"""What `python -c` runs first: a file in the working directory must not replace a module of Python."""


def lines_printed_by(program: str, environ: Mapping[str, str], seconds: float) -> list[str]:
    """The lines that `program`, Python code, prints; LaunchError with its last words where it fails."""
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
