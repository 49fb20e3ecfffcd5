"""A fork of the server turns into the process that asked for it."""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import io
import os
import runpy
import signal
import sys
from types import ModuleType
from typing import Any

LABEL = "TORCHMN_TEST_LABEL"
NAME_LENGTH = 15  # of a process, in Linux
SET_NAME = 15  # PR_SET_NAME, see prctl(2)
ABOVE_ALL_FILES = 512

# What Python finds by itself: without the directory of a script, and without PYTHONPATH.
own_path = sys.path[1:]


def become(request: dict[str, Any]) -> None:
    """Runs what the process that asked would run. Its end, also by an exception, is this process's end."""
    os.setsid()  # Ctrl-C in other jobs does not reach it
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    enter_the_host_of(request["process"])
    os.chdir(request["directory"])
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN if signum in request["ignored"] else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if signal.SIGINT in request["ignored"] else signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    be_called(os.environ.get(LABEL, "warm start"))
    take_files(dict(zip(request["files"], request["received"], strict=True)))
    open_streams(request["streams"])
    sys.modules["numpy"].random.seed()  # or all forks would draw the same numbers; `random` does it by itself
    run(request["arguments"])


def enter_the_host_of(process: int) -> None:
    """Moves to the namespaces of a process, in which tests have created a host for it (tests/_worlds/hosts.py)."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "ipc", "mnt"):
        theirs = f"/proc/{process}/ns/{kind}"
        if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{kind}"):
            continue
        with open(theirs) as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}", theirs)


def be_called(name: str) -> None:
    """Gives this process a name, by which tests find it: its environment shows in /proc only as the server's."""
    ctypes.CDLL(None).prctl(SET_NAME, name[:NAME_LENGTH].encode(), 0, 0, 0)


def take_files(received: dict[int, int]) -> None:
    """Has the files of `received` open under the numbers that are its keys, and no others."""
    aside = {number: fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE_ALL_FILES) for number, file in received.items()}
    os.closerange(0, ABOVE_ALL_FILES)
    for number, file in aside.items():
        os.dup2(file, number)
        os.close(file)


def open_streams(manners: list[tuple[str, str, bool, bool] | None]) -> None:
    """Opens the three standard streams as Python opened them in the process that asked.

    Where it opened them unbuffered, lines are written whole: several ranks share the output, and Python writes what
    `print` gets piece by piece.
    """
    for number, (name, manner) in enumerate(zip(("stdin", "stdout", "stderr"), manners, strict=True)):
        stream = None
        if manner is not None:
            encoding, errors, line_buffering, write_through = manner
            file = io.FileIO(number, "w" if number else "r", closefd=False)
            file.name = f"<{name}>"
            binary = io.BufferedWriter(file) if number else io.BufferedReader(file)
            stream = io.TextIOWrapper(
                binary,  # type: ignore[arg-type]
                encoding=encoding,
                errors=errors,
                line_buffering=line_buffering or write_through,
                write_through=write_through,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(arguments: list[str]) -> None:
    """Runs `[-m] PROGRAM ARGUMENTS` as Python itself does."""
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.orig_argv = [sys.executable, *arguments]
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(sys.argv[0]))
    named = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [first, *dict.fromkeys([*named, *own_path])]
    importlib.invalidate_caches()
    sys.modules["torchmn test server"] = sys.modules["__main__"]  # it lives on: its frames are below ours
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if is_module:
        runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]  (what the interpreter calls)
    else:
        main.__file__ = sys.argv[0]
        with open(sys.argv[0], "rb") as file:
            code = compile(file.read(), sys.argv[0], "exec", dont_inherit=True)
        exec(code, main.__dict__)
