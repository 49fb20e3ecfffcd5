"""A cache of arrays on disk, under the digest of all that they were computed from, so that it is never stale."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from torchmn.context import process
from torchmn.datasets.formats.files import check_fits, open_regular, reading, size_of


def user_folder() -> Path | None:
    """Returns TorchMN's directory among the user's caches; None if the user has no home directory."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchmn"
    except RuntimeError:  # neither HOME nor an entry in the list of users, as in many containers
        return None


def digest(files: Iterable[Path], *options: object) -> str:
    """Returns the key for the result of reading these files with these options."""
    key = hashlib.blake2b(repr(options).encode(), digest_size=16)
    for path in files:
        key.update(os.fsencode(path.name) + b"\0")  # names may be any bytes
        with reading(path, "a file of a data set"), open_regular(path) as file:
            check_fits(path, size_of(file))
            while chunk := file.read(1 << 20):
                key.update(chunk)
    return key.hexdigest()


def cached(key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns the memory-mapped array of this key; if it is not cached, makes it and tries to cache it."""
    folder = user_folder()
    if folder is None:
        return make()
    path = folder / "arrays" / f"{key}.npy"
    try:
        return _mapped(path)
    except Exception:  # not cached, or damaged, which NumPy reports in many ways
        array = make()
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{key}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            np.save(file, array, allow_pickle=False)
        # Atomic; ranks that make it at the same time replace each other's identical files.
        os.replace(temporary, path)
        return _mapped(path)
    except (OSError, ValueError):
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        return array


def _mapped(path: Path) -> np.ndarray:
    with process.numpy_files:  # NumPy parses headers with `ast`, which is not thread-safe in Python 3.11
        return np.load(path, mmap_mode="r", allow_pickle=False)
