"""Readers for the two official file formats of CIFAR: labels (count,) and pixels (count, 3072), as bytes.

binary: records of one label and 3072 pixels, one after the other
python: a pickled dict with "labels", a list, and "data", an array; written by Python 2
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchmn.datasets.formats.files import read_regular, reading
from torchmn.errors import DatasetError

PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS
MAX_OPERATIONS = 2_000_000
"""Of a pickle; CIFAR-100 has about 400,000."""
_PUT = ("PUT", "BINPUT", "LONG_BINPUT")


def read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels and pixels of a file in the binary format."""
    records = records_of(path, RECORD)
    return records[:, 0], records[:, 1:]


def records_of(path: Path, size: int) -> np.ndarray:
    """Returns the records (count, size) of a file in a binary format."""
    with reading(path, "records"):
        content = read_regular(path)
    if not content or len(content) % size:
        raise DatasetError(
            f"{path}: expected records of {size} bytes, got {len(content)} bytes, "
            f"{len(content) / size:.3f} records. Download the file again."
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, size)


def read_pickled(path: Path, labels_name: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    """Returns labels and pixels of a pickled batch, without running code that the pickle may contain."""
    with reading(path, "a pickled batch of CIFAR-10"):
        content = read_regular(path)
        try:
            _check_operations(content)
            batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
            labels, data = (_entry(batch, name) for name in (labels_name, "data"))
            pixels = data.array() if isinstance(data, _PickledArray) else None
            labels = np.array([_label(label) for label in labels], dtype=np.uint8)
        except DatasetError as error:
            raise DatasetError(f"{path}: {error}") from None
    if pixels is None or not len(labels) or pixels.shape != (len(labels), PIXELS):
        shape = "no array" if pixels is None else " x ".join(map(str, pixels.shape))
        raise DatasetError(f"{path}: expected {len(labels)} x {PIXELS} pixels for {len(labels)} labels, got {shape}.")
    return labels, pixels


def _check_operations(content: bytes) -> None:
    """Raises an error for a pickle that needs more memory or time than a batch of its size."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        # The unpickler reserves memory up to the largest number of an object.
        if operation.name in _PUT and (argument or 0) > count:
            raise DatasetError(f"the pickle numbers its object {argument}, after {count} operations")
        if count > MAX_OPERATIONS:
            raise DatasetError(f"expected a pickle of at most {MAX_OPERATIONS} operations")


def _entry(batch: Any, name: str) -> Any:
    """Returns an entry of the dict in a batch; keys are bytes if Python 2 wrote it, strings if Python 3 did."""
    if isinstance(batch, Mapping):
        for key in (name.encode(), name):
            if key in batch:
                return batch[key]
    raise DatasetError(f"expected a dict with {name!r}, got {type(batch).__name__}. Is this CIFAR-10?")


def _label(label: Any) -> int:
    if isinstance(label, int) and 0 <= label <= 255:
        return label
    raise DatasetError(f"expected labels from 0 to 9, got {label!r}")


class _Dtype:
    """Replaces numpy.dtype in the pickle: keeps the name only."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        pass


class _PickledArray:
    """Replaces numpy.ndarray in the pickle: keeps the state, which `array` checks."""

    def __init__(self, *_: object) -> None:
        self.state: tuple = ()

    def __setstate__(self, state: tuple) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """Returns the array; raises a DatasetError unless it is a complete array of bytes."""
        _, shape, dtype, is_fortran, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.name not in ("u1", "|u1"):
            raise DatasetError(f"expected an array of unsigned bytes, got {getattr(dtype, 'name', dtype)!r}")
        if not isinstance(shape, tuple) or len(shape) != 2 or not all(type(n) is int and n >= 0 for n in shape):
            raise DatasetError("expected an array of images x pixels")
        if not isinstance(content, bytes) or len(content) != math.prod(shape):
            raise DatasetError(f"expected {math.prod(shape)} bytes in an array of shape {shape}")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if is_fortran else "C")


def _encoded(text: str, encoding: str) -> bytes:
    """Replaces codecs.encode, with which Python 3 stores bytes in a pickle for Python 2."""
    if encoding != "latin1":
        raise DatasetError(f"expected bytes written as latin1, got {encoding!r}")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """Reads plain values and arrays of bytes. Of the functions that a pickle names, only `ALLOWED` are called."""

    ALLOWED: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encoded,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise DatasetError(
                f"the pickle refers to {module}.{name}, which no file of CIFAR-10 does; nothing was run. Do not trust "
                "this file."
            )
        return self.ALLOWED[module, name]


def images_of(rows: np.ndarray) -> np.ndarray:
    """Returns the pixels after the label of each row as images (count, 3, 32, 32): a read-only view."""
    return np.lib.stride_tricks.as_strided(
        rows[:, 1:], (len(rows), 3, 32, 32), (rows.strides[0], 1024, 32, 1), writeable=False
    )
