"""Starting the two servers, when the first job needs them, and ending them with this process."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "TORCHMN_TEST_WARM_START"
# With Python 3.10, workers that such a rank over gloo forks for its data often hang inside of fork: the interpreter
# takes one of its locks there before it makes it new.
IS_POSSIBLE = sys.platform == "linux" and sys.version_info >= (3, 11)
HERE = Path(__file__).parent
AT_START = str(HERE / "at_start")
# A server is not a rank, and its import path holds only its own modules.
FORGOTTEN = ("PYTHONPATH", "PYTHONHASHSEED", VARIABLE)


def warm_environment(path: Sequence[str]) -> dict[str, str]:
    """What lets a job's Python processes start warm, with `path` as their PYTHONPATH."""
    servers = os.environ.get(VARIABLE) or start_both()
    if servers == "0":
        return {"PYTHONPATH": os.pathsep.join(path)}
    return {"PYTHONPATH": os.pathsep.join([AT_START, *path]), VARIABLE: servers}


def start_both() -> str:
    """The directory of the servers' sockets. They are still importing, but who connects waits for them.

    "0", and no servers, where that is not possible.
    """
    if not IS_POSSIBLE:
        return "0"
    directory = tempfile.mkdtemp(prefix="torchmn-warm-start-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for number in range(2):
        start(f"{directory}/socket-{number}")
    os.environ[VARIABLE] = directory  # sessions that tests start use ours
    return directory


def start(address: str) -> None:
    """Starts a server that listens at `address` until this process ends, however it ends."""
    control, ours = os.pipe()  # `ours` closes with this process, and no process that we start inherits it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        environment = {name: value for name, value in os.environ.items() if name not in FORGOTTEN}
        process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(listener.fileno()), str(control)],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=(listener.fileno(), control),
            start_new_session=True,
        )
    os.close(control)

    def stop() -> None:
        os.close(ours)
        process.wait()

    atexit.register(stop)
