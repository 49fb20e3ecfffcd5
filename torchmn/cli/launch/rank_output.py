"""What the ranks print, as whole lines under their prefixes.

A line is shown once its rank has ended it, so lines of different ranks never mix. A progress bar is text that
its rank draws over again after a carriage return: on a terminal the latest state stays in the last row, below
the lines, whichever rank draws it; in a file or a pipe only the final state appears, as one line.
"""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Iterable

# A rank that never ends its line must not fill our memory: at this length the line is broken in two.
LONGEST_LINE = 64 * 2**20
ERASE_ROW = b"\r\x1b[K"


class Screen:
    """Our two output streams, and the row of the terminal in which a progress bar lives."""

    def __init__(self, out: int = 1, err: int = 2):
        self.out, self.err = out, err
        self._bar: tuple[int, bytes] | None = None
        self._unread: set[int] = set()  # streams whose reader is gone

    def lines(self, stream: int, lines: Iterable[bytes]) -> None:
        """Writes whole lines to `stream`, above the progress bar."""
        text = b"".join(line + b"\n" for line in lines)
        if text and self._bar is None:
            self.raw(stream, text)
        elif text and self._bar is not None:
            (where, drawn), self._bar = self._bar, None
            self.raw(where, ERASE_ROW)
            self.raw(stream, text)
            self.bar(where, drawn)

    def bar(self, stream: int, text: bytes | None) -> None:
        """Draws the state of a progress bar over the last one; None takes it away. Nothing off a terminal."""
        if os.isatty(stream):
            self.raw(stream, ERASE_ROW + (fitting(text) if text else b""))
            self._bar = (stream, text) if text else None

    def raw(self, stream: int, data: bytes) -> None:
        """Writes bytes as they are. Raises BrokenPipeError once when nobody reads the stream any more."""
        if stream in self._unread:
            return
        try:
            write(stream, data)
        except BrokenPipeError:
            self._unread.add(stream)
            raise


class RankStream:
    """One stream of one rank, on its way to the screen line by line."""

    def __init__(self, screen: Screen, stream: int, prefix: bytes = b""):
        self._screen, self._stream, self._prefix = screen, stream, prefix
        self._rest = bytearray()  # of a line that is not ended yet
        self._draws_bar = False

    def feed(self, data: bytes) -> None:
        """Takes what the rank wrote, and shows the lines that are complete."""
        if b"\n" not in data and b"\r" not in data and len(self._rest) + len(data) < LONGEST_LINE:
            self._rest += data
            self._update_bar()
            return
        *ended, rest = (self._rest + data).split(b"\n")
        if len(rest) >= LONGEST_LINE:
            ended.append(rest)
            rest = bytearray()
        # Only what is drawn since the last carriage return can still be seen: the states before it are gone.
        self._rest = rest[max(rest.rstrip(b"\r").rfind(b"\r"), 0) :]
        if ended:
            self._remove_bar()
        self._screen.lines(self._stream, (self._prefix + visible(line) for line in ended))
        self._update_bar()

    def close(self) -> None:
        """Shows what is left of a line that its rank never ended."""
        if self._rest:
            self.feed(b"\n")

    def _update_bar(self) -> None:
        drawn_over = self._rest.startswith(b"\r") or self._rest.endswith(b"\r")
        if drawn_over and (text := visible(self._rest)):
            self._screen.bar(self._stream, self._prefix + text)
            self._draws_bar = True

    def _remove_bar(self) -> None:
        if self._draws_bar:
            self._screen.bar(self._stream, None)
            self._draws_bar = False


class RawStream:
    """A stream that goes to the screen byte by byte: the rank that draws on the whole terminal."""

    def __init__(self, screen: Screen, stream: int):
        self._screen, self._stream = screen, stream

    def feed(self, data: bytes) -> None:
        """Shows what the rank wrote."""
        self._screen.raw(self._stream, data)

    def close(self) -> None:
        """Nothing is held back."""


def visible(line: bytes | bytearray) -> bytes:
    """What a terminal would show of a line: the text after its last carriage return."""
    return bytes(line.rstrip(b"\r").rpartition(b"\r")[2])


def fitting(text: bytes) -> bytes:
    """`text` cut to the terminal's row: a longer one would wrap, and could not be erased."""
    columns = shutil.get_terminal_size().columns - 1
    # The cut may fall between a colour and its end.
    return text.decode(errors="replace")[:columns].encode() + (b"\x1b[0m" if b"\x1b" in text else b"")


def write(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, also where the stream was made non-blocking by a program that shares it."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
