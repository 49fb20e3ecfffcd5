"""Python runs this at its start, before anything else, where tests have put this directory into PYTHONPATH.

The process that was started gives all that it has to a fork of a server, and ends as that one ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

SERVERS = os.environ.get("TORCHMN_TEST_WARM_START", "0")  # the directory of their sockets
# Variables with which launchers number their ranks.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
# The settings of Python that a fork can follow.
FOLLOWED = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
INHERITED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
SERVER_IS_GONE = 70


def hand_over(arguments: list[str]) -> None:
    """Lets a server's fork be `python *arguments` in our place, and ends with it."""
    rank = int(next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0"))
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"{SERVERS}/socket-{rank % 2}")
    files = inherited_files()
    request = repr(ourselves(arguments, files)).encode()
    for signum in PASSED_ON:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda number, _: pass_on(server, number))
    socket.send_fds(server, [len(request).to_bytes(8, "big")], files)
    server.sendall(request)
    # Our files stay open here, too: to a launcher, files that end before their process would be something new.
    end_as(server.recv(4))


def inherited_files() -> list[int]:
    """The files that the parent process has left open: the streams, and MPI's connection to its launcher."""
    files = []
    for file in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own, closed by now
            if os.get_inheritable(file):
                files.append(file)
    return files


def ourselves(arguments: list[str], files: list[int]) -> dict[str, object]:
    """All that makes this process what it is."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        "process": os.getpid(),
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "files": files,
        "streams": [
            stream and (stream.encoding, stream.errors, stream.line_buffering, stream.write_through)
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "umask": umask,
        "cores": sorted(os.sched_getaffinity(0)),
        "ignored": [int(signum) for signum in INHERITED if signal.getsignal(signum) is signal.SIG_IGN],
    }


def pass_on(server: socket.socket, signum: int) -> None:
    with suppress(OSError):  # the fork has just ended
        server.send(bytes([signum]))


def end_as(answer: bytes) -> None:
    """Ends this process as the fork ended: with its status, or by the same signal."""
    status = int.from_bytes(answer, "big", signed=True) if answer else SERVER_IS_GONE
    if status < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would not be useful
        with suppress(OSError):  # the action of SIGKILL cannot be set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def can_be_followed(program: list[str]) -> bool:
    """Whether a fork can be this process: no option or setting of Python, or number of threads, differs."""
    settings = {name for name in os.environ if name.startswith("PYTHON")}
    plain = bool(program) and (program[0] == "-m" or not program[0].startswith("-"))
    return plain and settings <= FOLLOWED and os.environ.get("OMP_NUM_THREADS") == "1"


if SERVERS != "0" and can_be_followed(sys.orig_argv[1:]):
    hand_over(sys.orig_argv[1:])
