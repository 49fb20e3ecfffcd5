"""A text, character by character: from each window the next character is to be told."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from torchmn.datasets.arrays import Arrays
from torchmn.errors import DatasetError

FIRST, LAST = 32, 126
"""The printable characters of ASCII."""
CHARACTERS = LAST - FIRST + 2
"""These, and one that stands for all others, which comes first."""
NAMES = ("other", *(chr(code) for code in range(FIRST, LAST + 1)))
BOOKS = ("pg2701.txt", "mobydick.txt")


def text(path: str | os.PathLike[str], *, length: int = 20, stride: int | None = None) -> Arrays:
    """Windows (count, length, 96), a one in each row, and the character after each of them (count,), 0 to 95.

    path: a text file, or a folder with one, such as Project Gutenberg's Moby Dick (pg2701.txt)
    length: of a window, in characters
    stride: how far apart windows begin; their length, if it is not given

    Ends of lines become spaces, as words go on behind them.
    """
    file = _find(Path(path).expanduser())
    codes = _codes(file)
    stride = length if stride is None else stride
    begins = np.arange(0, len(codes) - length, stride)
    if not len(begins):
        raise DatasetError(f"text: {file} has {len(codes)} characters, too few for a window of {length} and the next.")
    windows = codes[begins[:, None] + np.arange(length)]
    inputs = np.zeros((len(begins), length, CHARACTERS), dtype=np.uint8)
    np.put_along_axis(inputs, windows[:, :, None].astype(np.int64), 1, axis=2)
    return Arrays("text train", inputs, codes[begins + length].astype(np.int64), classes=NAMES)


def _codes(file: Path) -> np.ndarray:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DatasetError(f"text: {file} can not be read ({error.strerror}).") from error
    content = content.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b" ").replace(b"\n", b" ")
    codes = np.frombuffer(content, dtype=np.uint8).astype(np.int16)
    return np.where((codes >= FIRST) & (codes <= LAST), codes - FIRST + 1, 0).astype(np.uint8)


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise DatasetError(f"text: there is no file or folder {str(path)!r}.")
    texts = sorted(path.glob("*.txt"))
    chosen = [file for file in texts if file.name in BOOKS] or texts
    if len(chosen) != 1:
        found = ", ".join(file.name for file in texts[:5]) or "none"
        raise DatasetError(f"text: expected one text file in {str(path)!r}, got {found}. Name the file itself.")
    return chosen[0]
