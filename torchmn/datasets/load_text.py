"""`text`: windows of the characters of a text file, to predict the next character from each."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from torchmn.datasets.arrays import Arrays
from torchmn.datasets.formats.files import check_fits, entries_of, expanded, read_regular, reading
from torchmn.errors import DatasetError

FIRST, LAST = 32, 126
"""Codes of the printable ASCII characters."""
CHARACTERS = LAST - FIRST + 2
"""Number of classes: class 0 for all other characters, then the printable ones."""
NAMES = ("other", *(chr(code) for code in range(FIRST, LAST + 1)))
BOOKS = ("pg2701.txt", "mobydick.txt")


def text(path: str | os.PathLike[str], *, length: int = 20, stride: int | None = None) -> Arrays:
    """Returns one-hot windows of a text, and the character after each of them. Line ends become spaces.

    Args:
        path: a text file, or a directory with one, such as Project Gutenberg's Moby Dick (pg2701.txt).
        length: number of characters of a window.
        stride: distance between the starts of windows; by default `length`.

    Returns:
        Inputs (count, length, 96), bytes, and labels (count,) from 0 to 95, indices into `NAMES`.

    Raises:
        DatasetError: if the file cannot be read, or is too short.
    """
    file = _find(expanded(path))
    codes = _codes(file)
    stride = length if stride is None else stride
    begins = np.arange(0, len(codes) - length, stride)
    if not len(begins):
        raise DatasetError(
            f"text: {file} has {len(codes)} characters, too few for a window of {length} and the next character."
        )
    check_fits(file, len(begins) * length * CHARACTERS)
    windows = codes[begins[:, None] + np.arange(length)]
    inputs = np.zeros((len(begins), length, CHARACTERS), dtype=np.uint8)
    np.put_along_axis(inputs, windows[:, :, None].astype(np.int64), 1, axis=2)
    return Arrays("text train", inputs, codes[begins + length].astype(np.int64), classes=NAMES)


def _codes(file: Path) -> np.ndarray:
    with reading(file, "a text file"):
        content = read_regular(file)
    content = content.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b" ").replace(b"\n", b" ")
    codes = np.frombuffer(content, dtype=np.uint8).astype(np.int16)
    return np.where((codes >= FIRST) & (codes <= LAST), codes - FIRST + 1, 0).astype(np.uint8)


def _find(path: Path) -> Path:
    if not os.path.exists(path):
        raise DatasetError(f"text: no file or folder {str(path)!r}.")
    if not os.path.isdir(path):
        return path
    texts = [file for file in entries_of(path) if file.suffix == ".txt"]
    chosen = [file for file in texts if file.name in BOOKS] or texts
    if len(chosen) != 1:
        found = ", ".join(file.name for file in texts[:5]) or "none"
        raise DatasetError(f"text: expected one text file in {str(path)!r}, got {found}. Pass the path of the file.")
    return chosen[0]
