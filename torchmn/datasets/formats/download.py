"""Downloads a file from one of several mirrors, and verifies it before it gets its name."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from torchmn.datasets.formats.idx import read_bytes
from torchmn.errors import DatasetError

CHUNK = 1 << 16
SECONDS_WITHOUT_DATA = 20


def content_sha256(path: Path) -> str:
    """Returns the SHA-256 of the content of a file, decompressed if it is gzipped."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def fetch(name: str, sha256: str, folder: Path, mirrors: Sequence[str]) -> Path:
    """Downloads `folder/name` from the first mirror with the right content, and returns its path.

    The file is created atomically, after verification; several ranks may download it at the same time.

    Args:
        name: of the file.
        sha256: of its decompressed content.
        folder: where to store it.
        mirrors: URLs of directories, tried in this order.

    Raises:
        DatasetError: if no mirror has it, with the reason for each.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(
            f"cannot create the folder {str(folder)!r} for {name} ({error.strerror}). Pass a writable root."
        ) from error
    target = folder / name
    failures = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{name}"
        try:
            _fetch_from(url, target, sha256)
            return target
        except (OSError, HTTPException, DatasetError) as error:
            failures.append(f"  {url}: {_reason(error)}")
    raise DatasetError(
        f"could not download {name}:\n" + "\n".join(failures) + f"\nWithout a network: copy {name} to "
        f"{str(folder)!r} from a machine that has one, or omit download=True and root for the sample "
        f"that is part of TorchMN."
    )


def _fetch_from(url: str, target: Path, sha256: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with (
            os.fdopen(handle, "wb") as file,
            urllib.request.urlopen(url, timeout=SECONDS_WITHOUT_DATA) as reply,
        ):
            expected = int(reply.headers.get("Content-Length", 0))
            received = _copy(reply.read, file.write, expected, target.name)
        if received < expected:
            raise DatasetError(f"the connection broke after {received} of {expected} bytes")
        got = content_sha256(Path(temporary))
        if got != sha256:
            raise DatasetError(f"wrong content: expected SHA-256 {sha256}, got {got}")
        # mkstemp creates files that only their owner can read, but data folders are often shared.
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], int], total: int, name: str) -> int:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    received = 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"downloading {name}", total=total or None)
        while chunk := read(CHUNK):
            received += write(chunk)
            progress.update(task, completed=received)
    return received


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"no connection ({error.reason})"
    return str(error) or type(error).__name__
