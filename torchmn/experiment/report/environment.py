"""Where a run took place: versions, machine, ranks."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

import torchmn
from torchmn.communicators.communicator import Communicator


def environment(comm: Communicator) -> dict[str, str]:
    """Names and values; every rank must call it."""
    hosts = comm.allgather_obj(platform.node())
    return {
        "finished": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([_program(sys.argv[0]), *sys.argv[1:]]),
        "ranks": f"{comm.size} over {comm.traits.name}",
        "hosts": ", ".join(f"{host} ({hosts.count(host)})" for host in dict.fromkeys(hosts)),
        "device": str(comm.device),
        "threads per rank": str(torch.get_num_threads()),
        "cores of this machine": str(os.cpu_count()),
        "torchmn": torchmn.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _program(path: str) -> str:
    """What a user would type: ranks that `torchmn train -n` started run the command's module."""
    return "torchmn" if path.endswith(os.path.join("torchmn", "cli", "main.py")) else Path(path).name
