"""What is fuzzed: a function that writes damaged files, and one that reads them."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchmn.errors import TorchMNError


@dataclass(frozen=True)
class Subject:
    """A reader of files.

    Attributes:
        name: in tables and on the command line.
        file: name of the file that is written, relative to the folder of a case.
        content: returns the content of the file of a case.
        read: reads the file; an error that is not one of `errors` is a finding.
        errors: which the reader raises for files that it cannot read.
        section: the kind of files, for the table.
        may_be_pipe: whether the reader waits for a pipe or a terminal, so that no case has one.
        names_file: whether messages have to name the file or its folder.
    """

    name: str
    file: str
    content: Callable[[random.Random], bytes]
    read: Callable[[Path], object]
    errors: tuple[type[TorchMNError], ...]
    section: str
    may_be_pipe: bool = False
    names_file: bool = True

    def write(self, draw: random.Random, folder: Path) -> Path:
        """Writes the file of a case into a folder that does not exist, and returns its path."""
        path = folder / self.file
        path.parent.mkdir(parents=True)
        if draw.random() < 0.01:
            draw.choice(_SPECIAL if self.may_be_pipe else (*_SPECIAL, *_ENDLESS))(path)
        else:
            path.write_bytes(self.content(draw))
        return path


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # addresses of sockets have at most 108 characters
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)
    os.chdir(here)


_SPECIAL: tuple[Callable[[Path], object], ...] = (
    Path.mkdir, _socket,
    lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path.name),
    lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("/proc/self/mem"),
    lambda path: path.symlink_to("."),
    lambda path: path.symlink_to("x" * 250),
)  # fmt: skip
_ENDLESS: tuple[Callable[[Path], object], ...] = (os.mkfifo, lambda path: path.symlink_to("/dev/tty"))


def emptied(folder: Path) -> None:
    """Removes a folder of a case."""
    shutil.rmtree(folder, ignore_errors=True)
