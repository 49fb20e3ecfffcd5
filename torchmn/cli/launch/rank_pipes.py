"""The pipes between the ranks' processes and the launcher: what they print, and when they start and end."""

from __future__ import annotations

import fcntl
import os
import selectors
import shutil
import struct
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchmn.cli.launch.rank_output import RankStream, RawStream, Screen
from torchmn.cli.launch.rank_process import ENDING

CHUNK = 2**16
PIPEFULL = 16  # chunks, the most that Linux gives a pipe


@dataclass(frozen=True)
class Event:
    """A rank's process started (`value` is its process id) or ended (`value` is its exit status)."""

    kind: str
    rank: int
    value: int


class RankPipes:
    """Named pipes in a directory of their own, read together. rank_process.py holds their other ends.

    Named, because mpiexec stands between us and the ranks and hands no open files on. We hold both ends of
    each, so that a pipe is there before its rank, and does not end with it.
    """

    def __init__(self, size: int, screen: Screen, *, raw: bool):
        self.directory = Path(tempfile.mkdtemp(prefix="torchmn-run-"))
        self._selector = selectors.DefaultSelector()
        self._launcher_is_heard = True
        self._event_text = b""
        self._events_pipe = self._make("events")
        self._selector.register(self._events_pipe, selectors.EVENT_READ)
        self._streams: dict[int, RankStream | RawStream] = {}
        # What mpiexec itself says, and the ranks' wrappers before they find their own pipes.
        self._launcher = self._make("launcher")
        self._relay(self._launcher, RankStream(screen, screen.err, b"[mpiexec] "))
        # Opened on its own: mpiexec makes its output blocking, and would make our reading end so too.
        self.launcher_output = os.open(self.directory / "launcher", os.O_WRONLY)
        for rank in range(size):
            for name, target in ((f"{rank}.out", screen.out), (f"{rank}.err", screen.err)):
                if raw and rank == 0:
                    source = self._make_terminal(name) if os.isatty(target) else self._make(name)
                    self._relay(source, RawStream(screen, target))
                else:
                    prefix = b"" if raw else b"[%d] " % rank
                    self._relay(self._make(name), RankStream(screen, target, prefix))

    def wait(self, seconds: float) -> list[Event]:
        """The events of the next moment, at most `seconds` long, while output is passed on."""
        ready = [key.fd for key, _ in self._selector.select(seconds)]
        events = self._read_events()
        for source in ready:
            if source != self._events_pipe:
                self._read(source)
        return events

    def drain(self) -> list[Event]:
        """The events that are left, after everything that the ranks have written so far is passed on."""
        events = self._read_events()
        for source in self._streams:
            # No pipe holds more than this; a rank that goes on writing must not keep us here.
            for _ in range(PIPEFULL):
                if not self._read(source):
                    break
        return events

    def ignore_launcher(self) -> None:
        """Drops what mpiexec itself says from now on."""
        self._launcher_is_heard = False

    def hold_ended_ranks(self) -> None:
        """Makes the process around each rank stay when the rank has ended, so that mpiexec does not end the others."""
        (self.directory / ENDING).touch()

    def close(self) -> None:
        """Passes on the last output, and removes the pipes."""
        try:
            self.drain()
            for stream in self._streams.values():
                stream.close()
        finally:
            self._selector.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _make(self, name: str) -> int:
        path = self.directory / name
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def _make_terminal(self, name: str) -> int:
        """A pseudo-terminal in a pipe's place, so that rank 0 draws as it would without us."""
        ours, its = os.openpty()
        mode = termios.tcgetattr(its)
        mode[1] &= ~termios.OPOST  # our own terminal already turns \n into \r\n
        termios.tcsetattr(its, termios.TCSANOW, mode)
        with suppress(OSError):
            columns, rows = os.get_terminal_size(1)
            fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.symlink(os.ttyname(its), self.directory / name)
        os.set_blocking(ours, False)
        return ours

    def _relay(self, source: int, stream: RankStream | RawStream) -> None:
        self._streams[source] = stream
        self._selector.register(source, selectors.EVENT_READ)

    def _read(self, source: int) -> bool:
        data = read(source)
        if data and (source != self._launcher or self._launcher_is_heard):
            self._streams[source].feed(data)
        return bool(data)

    def _read_events(self) -> list[Event]:
        *ended, self._event_text = (self._event_text + read(self._events_pipe)).split(b"\n")
        events = [Event(kind.decode(), int(rank), int(value)) for kind, rank, value in map(bytes.split, ended)]
        # A rank reports its failure before mpiexec can notice it; mpiexec's banner then has nothing to add.
        if any(event.kind == "end" and event.value for event in events):
            self.ignore_launcher()
        return events


def read(source: int) -> bytes:
    """What can be read without waiting, at most a chunk."""
    try:
        return os.read(source, CHUNK)
    except OSError:  # nothing there, or a terminal that no one holds any more
        return b""


@contextmanager
def rank_pipes(size: int, screen: Screen, *, raw: bool) -> Iterator[RankPipes]:
    """RankPipes that are removed in the end."""
    pipes = RankPipes(size, screen, raw=raw)
    try:
        yield pipes
    finally:
        pipes.close()
