"""`npz`: inputs and targets in an .npz file of NumPy."""

from __future__ import annotations

import io
import math
import os
import zipfile
from pathlib import Path

import numpy as np

from torchmn.context import process
from torchmn.datasets.arrays import Arrays
from torchmn.datasets.formats.files import (
    UNPACKED_PER_BYTE,
    check_fits,
    expanded,
    most_unpacked,
    open_regular,
    reading,
)
from torchmn.errors import DatasetError

MOST_SHOWN = 200
"""Characters of the names in a message."""

_MAX_HEADER = _CHUNK = 1 << 16
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Those that NumPy writes; others need much more memory than their size."""

# Names of inputs and targets, by split, in the order in which they are tried.
NAMES = {
    "train": (("x_train", "y_train"), ("train_inputs", "train_targets"), ("inputs", "targets"), ("x", "y")),
    "test": (("x_test", "y_test"), ("test_inputs", "test_targets")),
}


def npz(path: str | os.PathLike[str], split: str = "train") -> Arrays | None:
    """Returns the arrays of a split in an .npz file; None if the file has no test split.

    Args:
        path: file with arrays x_train, y_train, and possibly x_test, y_test. Inputs are bytes, which are scaled to 0
            to 1, or floats; integer targets are labels, floats are values. Arrays of Python objects, which might run
            code, are refused.
        split: "train" or "test".

    Returns:
        The inputs and targets of the split, or None.

    Raises:
        DatasetError: if the file cannot be read, or the arrays do not fit.
    """
    path = expanded(path)
    with reading(path, "a readable .npz file"), open_regular(path) as file, zipfile.ZipFile(file) as archive:
        present = [name.removesuffix(".npy") for name in archive.namelist()]
        pair = next((names for names in NAMES[split] if names[0] in present), None)
        if pair is None:
            if split == "test":
                return None
            found = ", ".join(present[:8]) or "nothing"
            raise DatasetError(f"{path}: expected arrays x_train and y_train, got: {found[:MOST_SHOWN]}.")
        if pair[1] not in present:
            raise DatasetError(f"{path}: it has {pair[0]}, but no {pair[1]}.")
        _check_size(path, [archive.getinfo(f"{name}.npy") for name in pair])
        return checked(path, split, *(array_of(archive, name) for name in pair))


def _check_size(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Raises a DatasetError for arrays that unpack to more than the memory, or to far more than their file."""
    size, packed = sum(member.file_size for member in members), sum(member.compress_size for member in members)
    check_fits(path, size)
    if size > packed and size > most_unpacked(packed):
        raise DatasetError(
            f"{path}: expected arrays that unpack to at most {most_unpacked(packed)} bytes, {UNPACKED_PER_BYTE} times "
            f"their size in the file, got {size}. Write it with numpy.savez instead of savez_compressed."
        )


def checked(path: Path, split: str, inputs: np.ndarray, targets: np.ndarray) -> Arrays:
    """Returns the arrays of a split, converted to supported dtypes; raises a DatasetError if they do not fit."""
    # torch supports native byte order only.
    inputs, targets = (x.astype(x.dtype.newbyteorder("="), copy=False) for x in (inputs, targets))
    if inputs.ndim < 2 or inputs.dtype.kind not in "fub":
        raise DatasetError(f"{path}: expected inputs of bytes or floats with a first dim of samples, got "
                           f"{inputs.dtype} of shape {inputs.shape}.")  # fmt: skip
    if targets.ndim == 0 or len(inputs) != len(targets) or not len(inputs):
        raise DatasetError(
            f"{path}: expected equally many inputs and targets, at least one, got shapes {inputs.shape} and "
            f"{targets.shape}."
        )
    if targets.dtype.kind in "iu":
        targets = targets.reshape(len(targets), -1)[:, 0] if targets.ndim > 1 and targets.shape[1:] == (1,) else targets
        if targets.ndim != 1 or targets.min() < 0:
            raise DatasetError(f"{path}: expected labels 0, 1, 2, ..., one for each sample, got shape {targets.shape}.")
        targets = targets.astype(np.int64)
        if targets.min() < 0:
            raise DatasetError(f"{path}: expected labels 0, 1, 2, ..., got one beyond those of int64.")
    elif targets.dtype.kind != "f":
        raise DatasetError(f"{path}: expected targets that are integers (labels) or floats, got {targets.dtype}.")
    for name, values in (("inputs", inputs), ("targets", targets)):
        if not np.isfinite(values).all():
            raise DatasetError(f"{path}: some {name} are not finite.")
    scale = 1 / 255 if inputs.dtype == np.uint8 else 1.0
    if inputs.dtype.kind == "f" and inputs.dtype != np.float64:
        inputs = inputs.astype(np.float32)
    if targets.dtype == np.longdouble:  # which torch does not have
        targets = targets.astype(np.float64)
    return Arrays(f"{path.stem} {split}", inputs, targets, scale)


def array_of(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Returns an array; raises an error of any type if it is damaged."""
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type not in METHODS:
        raise ValueError(f"{name} is compressed by method {member.compress_type}, which NumPy does not use")
    with archive.open(member) as content:
        header = io.BytesIO(content.read(_MAX_HEADER))
        shape, is_fortran, dtype = _described(header)
        if dtype.hasobject:
            raise ValueError(f"{name} has Python objects, which might run code")
        count = math.prod(shape)
        if min(shape, default=0) < 0 or count * dtype.itemsize != member.file_size - header.tell():
            raise ValueError(f"{name}: expected an array of shape {shape}, got {member.file_size} bytes")
        values = np.empty(count, dtype)
        target, filled = values.view(np.uint8).data, 0  # a view, so that the content is in memory once
        while chunk := header.read() or content.read(_CHUNK):  # the last read compares the checksum
            target[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        if filled < len(target):
            raise EOFError(f"{name} ends after {filled} of {len(target)} bytes")
    return values.reshape(shape, order="F" if is_fortran else "C")


def _described(header: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Returns shape, order and dtype, and leaves `header` where the values begin."""
    version = np.lib.format.read_magic(header)
    if version not in ((1, 0), (2, 0)):  # 3.0 is for names of fields
        raise ValueError(f"expected version 1.0 or 2.0 of the .npy format, got {version[0]}.{version[1]}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with process.numpy_files:  # NumPy parses headers with `ast`, which is not thread-safe in Python 3.11
        try:
            return read(header)
        except MemoryError:  # raised by Python's parser for many levels; a header has at most 10,000 characters
            raise ValueError("its header has too many levels") from None
