"""The files that a page of the documentation asks its reader to save, and the commands that it shows."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_FILE = re.compile(r"(?:Save|and) (?:this|it) as `([\w.]+)`.*?```(?:python|yaml)\n(.*?)```", re.DOTALL)


def files_of(page: str) -> dict[str, str]:
    """Returns the files to save, by name."""
    return dict(_FILE.findall(page))


def commands_of(page: str) -> list[str]:
    """Returns the lines of the shell blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]


def environment() -> dict[str, str]:
    """Returns variables with which `python`, `torchmn` and `mpiexec` are those of this environment."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
