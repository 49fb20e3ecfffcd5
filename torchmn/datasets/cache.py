"""Arrays that took work to make, kept on disk under a name that follows from all they were made of.

Another content has another name: what is found is never stale.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from torchmn.context import process


def folder() -> Path:
    """Where arrays are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchmn" / "arrays"


def digest(files: Iterable[Path], *about: object) -> str:
    """What names the result of reading these files in this way."""
    key = hashlib.blake2b(repr(about).encode(), digest_size=16)
    for path in files:
        key.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                key.update(chunk)
    return key.hexdigest()


def kept(key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array of this key, mapped into memory; made and kept if it is not there, and only made if it can not be."""
    path = folder() / f"{key}.npy"
    try:
        return _mapped(path)
    except (OSError, ValueError, EOFError):
        array = make()
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{key}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            np.save(file, array, allow_pickle=False)
        # All at once: ranks that make it at the same time replace each other's, which is the same.
        os.replace(temporary, path)
        return _mapped(path)
    except (OSError, ValueError):
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        return array


def _mapped(path: Path) -> np.ndarray:
    with process.numpy_files:  # NumPy parses the head of a file with `ast`: in Python 3.11, not in two threads at once
        return np.load(path, mmap_mode="r", allow_pickle=False)
