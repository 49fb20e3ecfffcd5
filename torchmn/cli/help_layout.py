"""Help texts and messages that fit the width of the terminal, broken between words only."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import TextIO

WIDEST = 100
"""Columns of a help text in a wider terminal; longer lines are hard to read."""

TERM = re.compile(r"( *\S(?:.*?\S)?  +)(?=\S)")
"""The beginning of a line `term   its description`."""
COMMAND = re.compile(r"(?<=: )torchmn .*")
"""A command at the end of a message, to be copied as a whole."""
USAGE_PART = re.compile(r"\[[^\]]*\]|\([^)]*\)|\S+")


class HelpLayout(argparse.HelpFormatter):
    """Wraps usage, description and epilog, which argparse prints as they are or joins into one paragraph."""

    def __init__(self, prog: str, **options: object):
        columns = shutil.get_terminal_size().columns
        super().__init__(prog, width=min(columns - 2, WIDEST))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrapped(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(line for paragraph in _paragraphs(text) for line in _lines(paragraph, width)) + "\n"

    def _format_usage(self, usage, actions, groups, prefix) -> str:
        if usage is None:
            return super()._format_usage(usage, actions, groups, prefix)
        parts = USAGE_PART.findall(usage % {"prog": self._prog})
        indent = " " * (len("usage: ") + len(" ".join(parts[:2])) + 1)
        lines, line = [], "usage:"
        for part in parts:
            if len(line) + 1 + len(part) > self._width and line.strip():
                lines, line = [*lines, line], indent[:-1]
            line = f"{line} {part}"
        return "\n".join([*lines, line]) + "\n\n"


def _paragraphs(text: str) -> Iterator[list[str]]:
    """Yields the lines that belong together: a paragraph, a term with its description, or a line of an example."""
    block: list[str] = []
    for line in text.rstrip().splitlines():
        term = TERM.match(block[0]) if block else None
        hanging = len(term[1]) if term else 0
        continues = bool(block and block[0].strip() and line.strip()) and (
            line.startswith(" " * hanging) and not line[hanging:].startswith(" ") if term else not _is_apart(line)
        )
        if block and not continues:
            yield block
            block = []
        block.append(line)
    if block:
        yield block


def _is_apart(line: str) -> bool:
    return line.startswith(" ") or TERM.match(line) is not None


def _lines(block: list[str], width: int) -> list[str]:
    term = TERM.match(block[0])
    label = term[1] if term else ""
    if not label and block[0].startswith(" "):  # an example to copy
        return block
    text = " ".join(line.strip() for line in [block[0][len(label) :], *block[1:]])
    return _wrapped(text, width, label) or [""]


def fitted(text: str, stream: TextIO) -> str:
    """Returns a message with the line breaks that it needs in the terminal `stream`; as it is for files and pipes.

    A terminal breaks long lines inside of words. A command at the end moves to a line that is not broken here.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.split("\n") for part in _fitted_line(line, width))


def _fitted_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    command = COMMAND.search(line)
    text, rest = (line[: command.start()], [command[0]]) if command else (line, [])
    indent = line[: len(line) - len(line.lstrip())]
    return [*_wrapped(text.strip(), width, indent), *(indent + part for part in rest)]


def _wrapped(text: str, width: int, label: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
