"""What ranks print, on its way to the screen: whole lines, and a progress bar that stays below them."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import tty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.commands import script, started
from torchmn.cli.launch import rank_output
from torchmn.cli.launch.rank_output import RankStream, Screen, visible


class Pipe:
    """A pipe whose contents can be read while it is open."""

    def __init__(self):
        self.reader, self.writer = os.pipe()

    def text(self) -> str:
        """What was written since the last time."""
        # A terminal delivers bytes in pieces and with delay, but in order: a mark shows the end.
        os.write(self.writer, b"\0")
        data = b""
        while not data.endswith(b"\0"):
            data += os.read(self.reader, 2**16)
        return data[:-1].decode()

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


class Terminal(Pipe):
    """A terminal that passes bytes on as they are."""

    def __init__(self):
        self.reader, self.writer = pty.openpty()
        tty.setraw(self.writer)


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    made.close()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    made = Terminal()
    yield made
    made.close()


@given(st.lists(st.text("ab\n", max_size=12), max_size=20))
def test_lines_do_not_depend_on_how_the_text_is_split(pieces):
    pipe = Pipe()
    stream = RankStream(Screen(out=pipe.writer), pipe.writer, b"[7] ")
    for piece in pieces:
        stream.feed(piece.encode())
    stream.close()
    whole = "".join(pieces)
    lines = whole.removesuffix("\n").split("\n") if whole else []
    try:
        assert pipe.text() == "".join(f"[7] {line}\n" for line in lines)
    finally:
        pipe.close()


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        (b"plain", b"plain"),
        (b"windows\r", b"windows"),
        (b"\r10%\r20%\r100%", b"100%"),
        (b"10%\r20%\r100%\r", b"100%"),
        (b"\r", b""),
        (b"", b""),
    ],
)
def test_of_a_rewritten_line_the_last_state_is_visible(line, seen):
    assert visible(line) == seen


def test_a_line_is_shown_only_when_it_is_complete(pipe):
    screen = Screen(out=pipe.writer)
    first, second = (RankStream(screen, pipe.writer, prefix) for prefix in (b"[0] ", b"[1] "))
    first.feed(b"half")
    second.feed(b"whole\nrest")
    assert pipe.text() == "[1] whole\n"
    first.feed(b" and half\n")
    assert pipe.text() == "[0] half and half\n"
    second.close()
    assert pipe.text() == "[1] rest\n"


def test_a_very_long_line_is_broken(pipe, monkeypatch):
    monkeypatch.setattr(rank_output, "LONGEST_LINE", 10)
    stream = RankStream(Screen(out=pipe.writer), pipe.writer)
    for _ in range(5):
        stream.feed(b"abcd")
    stream.close()
    assert pipe.text() == "abcdabcdabcd\nabcdabcd\n"


def test_a_progress_bar_stays_below_the_lines_of_other_ranks(terminal):
    screen = Screen(out=terminal.writer, err=terminal.writer)
    first, second = (RankStream(screen, terminal.writer, prefix) for prefix in (b"[0] ", b"[1] "))
    first.feed(b"\r10%")
    assert terminal.text() == "\r\x1b[K[0] 10%"
    second.feed(b"a line\n")
    assert terminal.text() == "\r\x1b[K[1] a line\n\r\x1b[K[0] 10%"
    first.feed(b"\r20%")
    assert terminal.text() == "\r\x1b[K[0] 20%"
    first.feed(b"\r100%\n")
    assert terminal.text() == "\r\x1b[K[0] 100%\n"
    second.feed(b"after it\n")
    assert terminal.text() == "[1] after it\n"


def test_a_progress_bar_with_a_trailing_carriage_return_is_drawn(terminal):
    stream = RankStream(Screen(out=terminal.writer), terminal.writer, b"[0] ")
    stream.feed(b"10%\r")
    stream.feed(b"20%\r")
    assert terminal.text() == "\r\x1b[K[0] 10%\r\x1b[K[0] 20%"


def test_a_progress_bar_never_wraps_into_the_next_row(terminal):
    stream = RankStream(Screen(out=terminal.writer), terminal.writer, b"[0] ")
    stream.feed(b"\r" + b"#" * 100)
    assert terminal.text() == "\r\x1b[K[0] " + "#" * 15


def test_a_closed_stream_is_reported_once(pipe):
    screen = Screen(out=pipe.writer)
    os.close(pipe.reader)
    with pytest.raises(BrokenPipeError):
        screen.lines(pipe.writer, [b"one"])
    screen.lines(pipe.writer, [b"two"])  # dropped: the ranks may still clean up
    pipe.reader = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--raw"], ["0 True 33", "1 False None"]),
        ([], ["[0] 0 False None", "[1] 1 False None"]),
    ],
)
def test_with_raw_output_rank_0_writes_to_the_terminal(arguments, expected, tmp_path, terminal):
    path = script(
        tmp_path,
        """
        columns = os.get_terminal_size(1).columns if sys.stdout.isatty() else None
        sys.stdout.write(f"{rank} {sys.stdout.isatty()} {columns}\\n")  # at once: ranks write to one terminal
        """,
    )
    set_columns(terminal.writer, 33)
    with started("run", "-n", "2", "--transport", "gloo", *arguments, path, stdout=terminal.writer) as command:
        assert command.process.wait(timeout=100) == 0
    assert sorted(terminal.text().split("\n")[:-1]) == expected


def set_columns(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
