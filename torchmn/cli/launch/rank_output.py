"""Writes the output of ranks as whole lines with prefixes.

A line is written once it is complete, so lines of different ranks never mix. A progress bar is a line that a rank
rewrites after a carriage return: on a terminal its latest state stays in the last row, below the other lines; in a
file or a pipe only the final state appears, as one line.
"""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Iterable

# Longer lines are broken, so that a rank that never ends its line cannot exhaust memory.
LONGEST_LINE = 64 * 2**20
ERASE_ROW = b"\r\x1b[K"


class Screen:
    """Standard output and error of this process, with a progress bar in the last row of a terminal."""

    def __init__(self, out: int = 1, err: int = 2):
        self.out, self.err = out, err
        self._bar: tuple[int, bytes] | None = None
        self._closed: set[int] = set()  # streams whose reader has exited

    def lines(self, stream: int, lines: Iterable[bytes]) -> None:
        """Writes whole lines to `stream`, above the progress bar."""
        text = b"".join(line + b"\n" for line in lines)
        if text and self._bar is None:
            self.raw(stream, text)
        elif text and self._bar is not None:
            (bar_stream, bar_text), self._bar = self._bar, None
            self.raw(bar_stream, ERASE_ROW)
            self.raw(stream, text)
            self.bar(bar_stream, bar_text)

    def bar(self, stream: int, text: bytes | None) -> None:
        """Replaces the progress bar; None removes it. No effect if `stream` is not a terminal."""
        if os.isatty(stream):
            self.raw(stream, ERASE_ROW + (fitting(text) if text else b""))
            self._bar = (stream, text) if text else None

    def raw(self, stream: int, data: bytes) -> None:
        """Writes bytes unchanged. Raises BrokenPipeError once if the reader of the stream has exited."""
        if stream in self._closed:
            return
        try:
            write(stream, data)
        except BrokenPipeError:
            self._closed.add(stream)
            raise


class RankStream:
    """Line-buffers one output stream of one rank."""

    def __init__(self, screen: Screen, stream: int, prefix: bytes = b""):
        self._screen, self._stream, self._prefix = screen, stream, prefix
        self._rest = bytearray()  # the incomplete last line
        self._draws_bar = False

    def feed(self, data: bytes) -> None:
        """Adds data of the rank, and writes the lines that are complete."""
        if b"\n" not in data and b"\r" not in data and len(self._rest) + len(data) < LONGEST_LINE:
            self._rest += data
            self._update_bar()
            return
        *ended, rest = (self._rest + data).split(b"\n")
        if len(rest) >= LONGEST_LINE:
            ended.append(rest)
            rest = bytearray()
        # A carriage return overwrites the text before it: only the latest state of a progress bar is kept.
        self._rest = rest[max(rest.rstrip(b"\r").rfind(b"\r"), 0) :]
        if ended:
            self._remove_bar()
        self._screen.lines(self._stream, (self._prefix + visible(line) for line in ended))
        self._update_bar()

    def close(self) -> None:
        """Writes the last line if it is incomplete."""
        if self._rest:
            self.feed(b"\n")

    def _update_bar(self) -> None:
        is_bar = self._rest.startswith(b"\r") or self._rest.endswith(b"\r")
        if is_bar and (text := visible(self._rest)):
            self._screen.bar(self._stream, self._prefix + text)
            self._draws_bar = True

    def _remove_bar(self) -> None:
        if self._draws_bar:
            self._screen.bar(self._stream, None)
            self._draws_bar = False


class RawStream:
    """Passes one output stream of a rank to the screen unchanged."""

    def __init__(self, screen: Screen, stream: int):
        self._screen, self._stream = screen, stream

    def feed(self, data: bytes) -> None:
        """Writes data of the rank."""
        self._screen.raw(self._stream, data)

    def close(self) -> None:
        """Does nothing: no data is buffered."""


def visible(line: bytes | bytearray) -> bytes:
    """Returns the part of a line that a terminal would show: the text after the last carriage return."""
    return bytes(line.rstrip(b"\r").rpartition(b"\r")[2])


def fitting(text: bytes) -> bytes:
    """Returns `text` truncated to the terminal's width: a wrapped row could not be erased."""
    columns = shutil.get_terminal_size().columns - 1
    # The truncated part may contain the sequence that resets a colour.
    return text.decode(errors="replace")[:columns].encode() + (b"\x1b[0m" if b"\x1b" in text else b"")


def write(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, even if another program has made the shared stream non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
