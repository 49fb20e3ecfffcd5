"""A process that has imported what ranks import, and forks into whatever process asks for it.

    python server.py LISTENER CONTROL

Both are numbers of open files: the socket that listens, and a pipe that closes when the server is no longer needed.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from rebirth import become

# torch._dynamo: the first optimizer imports it. No MPI, no matplotlib: what they load depends on the environment.
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "numpy", "pydantic", "pytest", "yaml", "rich.progress")

Request = dict[str, Any]


class Server:
    """Forks processes, and keeps a connection to the process that each of them represents."""

    def __init__(self, listener: socket.socket, control: int):
        self.listener, self.control = listener, control
        self.lines: dict[int, socket.socket] = {}  # of each living fork, by its process id
        self.selector = selectors.DefaultSelector()
        self.ends, alarm = os.pipe()
        os.set_blocking(alarm, False)
        signal.set_wakeup_fd(alarm)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # handled, so that the alarm is written to
        for file in (listener, control, self.ends):
            self.selector.register(file, selectors.EVENT_READ)

    def serve(self) -> Request:
        """What this process is to become: it returns in forks only."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    request = self._fork()
                    if request is not None:
                        return request
                elif key.fileobj == self.ends:
                    os.read(self.ends, 4096)
                    self._report_ends()
                elif key.fileobj == self.control:
                    for pid in self.lines:
                        kill(pid)
                    os._exit(0)
                elif key.data in self.lines:
                    self._obey(key.data)

    def _fork(self) -> Request | None:
        line, _ = self.listener.accept()
        request = read_request(line)
        if request is None:
            line.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._forget(line)
            return request
        for file in request["received"]:
            os.close(file)
        self.lines[pid] = line
        self.selector.register(line, selectors.EVENT_READ, data=pid)
        return None

    def _forget(self, line: socket.socket) -> None:
        """In a fork: ends the server. To close a socket later might close another file with the same number."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for sock in (self.listener, line, *self.lines.values()):
            sock.detach()

    def _report_ends(self) -> None:
        while self.lines:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            line = self.lines.pop(pid)
            with suppress(OSError):  # its process is gone
                line.send(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
            self._hang_up(line)

    def _obey(self, pid: int) -> None:
        """Passes signals on to a fork; ends it when the process that it replaces is gone."""
        line = self.lines[pid]
        try:
            signals = line.recv(64)
        except ConnectionError:
            signals = b""
        for signum in signals:
            os.kill(pid, signum)  # it is there, or a zombie: it leaves `lines` when we have waited for it
        if not signals:
            kill(pid)
            self._hang_up(line)

    def _hang_up(self, line: socket.socket) -> None:
        if line.fileno() >= 0:
            self.selector.unregister(line)
            line.close()


def kill(pid: int) -> None:
    """Ends a fork and what it has started, as far as that stayed in its group."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        os.killpg(pid, signal.SIGKILL)


def read_request(line: socket.socket) -> Request | None:
    """Returns the description that a process sent, with its files in `received`; None if it has ended meanwhile."""
    try:
        size, files, _, _ = socket.recv_fds(line, 8, 250)
        text = b""
        while size and len(text) < int.from_bytes(size, "big"):
            piece = line.recv(1 << 20)
            if not piece:
                return None
            text += piece
    except ConnectionError:
        return None
    return ast.literal_eval(text.decode()) | {"received": files} if text else None


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what the forks share stays shared
    become(Server(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve())
