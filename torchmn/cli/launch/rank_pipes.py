"""RankPipes: the named pipes through which ranks send their output, their start and their end to the launcher."""

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
PIPE_CHUNKS = 16  # the largest capacity of a pipe on Linux


@dataclass(frozen=True)
class Event:
    """A rank's process started (`value` is its process id) or ended (`value` is its exit status)."""

    kind: str
    rank: int
    value: int


class RankPipes:
    """Named pipes in a private directory, whose other ends rank_process.py opens.

    They are named because mpiexec, which starts the ranks, does not pass on open files. Both ends are held open here,
    so that a pipe exists before its rank and survives it.
    """

    def __init__(self, size: int, screen: Screen, *, raw: bool):
        self.directory = Path(tempfile.mkdtemp(prefix="torchmn-run-"))
        self._selector = selectors.DefaultSelector()
        self._shows_launcher = True
        self._event_text = b""
        self._events_pipe = self._make("events")
        self._selector.register(self._events_pipe, selectors.EVENT_READ)
        self._streams: dict[int, RankStream | RawStream] = {}
        # Output of mpiexec itself, and of ranks before they have opened their pipes.
        self._launcher = self._make("launcher")
        self._relay(self._launcher, RankStream(screen, screen.err, b"[mpiexec] "))
        # Opened separately: mpiexec makes its output blocking, and with a shared descriptor our reading end too.
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
        """Waits up to `seconds` for data, relays output, and returns the events."""
        ready = [key.fd for key, _ in self._selector.select(seconds)]
        events = self._read_events()
        for source in ready:
            if source != self._events_pipe:
                self._read(source)
        return events

    def drain(self) -> list[Event]:
        """Relays all output written so far, and returns the remaining events."""
        events = self._read_events()
        for source in self._streams:
            # Bounded by the capacity of a pipe, so that a rank that keeps writing does not block us.
            for _ in range(PIPE_CHUNKS):
                if not self._read(source):
                    break
        return events

    def ignore_launcher(self) -> None:
        """Discards the output of mpiexec itself from now on."""
        self._shows_launcher = False

    def hold_ended_ranks(self) -> None:
        """Makes the wrapper process of each rank wait after the rank has ended, so that mpiexec does not end others."""
        (self.directory / ENDING).touch()

    def close(self) -> None:
        """Relays the last output and removes the pipes."""
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
        """Creates a pseudo-terminal instead of a pipe, so that rank 0 writes as to a terminal."""
        controller, terminal = os.openpty()
        mode = termios.tcgetattr(terminal)
        mode[1] &= ~termios.OPOST  # the outer terminal already turns \n into \r\n
        termios.tcsetattr(terminal, termios.TCSANOW, mode)
        with suppress(OSError):
            columns, rows = os.get_terminal_size(1)
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.symlink(os.ttyname(terminal), self.directory / name)
        os.set_blocking(controller, False)
        return controller

    def _relay(self, source: int, stream: RankStream | RawStream) -> None:
        self._streams[source] = stream
        self._selector.register(source, selectors.EVENT_READ)

    def _read(self, source: int) -> bool:
        data = read(source)
        if data and (source != self._launcher or self._shows_launcher):
            self._streams[source].feed(data)
        return bool(data)

    def _read_events(self) -> list[Event]:
        *ended, self._event_text = (self._event_text + read(self._events_pipe)).split(b"\n")
        events = [Event(kind.decode(), int(rank), int(value)) for kind, rank, value in map(bytes.split, ended)]
        # A rank reports its failure before mpiexec notices it; mpiexec's banner adds no information then.
        if any(event.kind == "end" and event.value for event in events):
            self.ignore_launcher()
        return events


def read(source: int) -> bytes:
    """Returns the data that can be read without blocking, at most CHUNK bytes."""
    try:
        return os.read(source, CHUNK)
    except OSError:  # no data, or a pseudo-terminal that no process has open
        return b""


@contextmanager
def rank_pipes(size: int, screen: Screen, *, raw: bool) -> Iterator[RankPipes]:
    """Creates RankPipes, and removes them on exit."""
    pipes = RankPipes(size, screen, raw=raw)
    try:
        yield pipes
    finally:
        pipes.close()
