"""Downloads a file from one of several mirrors, and verifies it before it gets its name."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from torchmn.datasets.formats.idx import content_sha256
from torchmn.errors import DatasetError

CHUNK = 1 << 16
SECONDS_WITHOUT_DATA = 20
MAX_SECONDS = 1800
"""Of a download from one mirror, in all."""
MAX_BYTES = 1 << 28


def fetch(
    name: str,
    sha256: str,
    folder: Path,
    mirrors: Sequence[str],
    *,
    max_bytes: int = MAX_BYTES,
    max_seconds: float = MAX_SECONDS,
) -> Path:
    """Downloads `folder/name` from the first mirror with the right content, and returns its path.

    The file is created atomically, after verification; several ranks may download it at the same time.

    Args:
        name: of the file.
        sha256: of its decompressed content.
        folder: where to store it.
        mirrors: URLs of directories, tried in this order.
        max_bytes: limit of the file as it is downloaded; a mirror that sends more is left.
        max_seconds: limit of the time for each mirror.

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
            _fetch_from(url, target, sha256, max_bytes, max_seconds)
            return target
        except Exception as error:  # what a server sends may fail in any way
            failures.append(f"  {url}: {_reason(error)}")
    raise DatasetError(
        f"could not download {name}:\n" + "\n".join(failures) + f"\nWithout a network: copy {name} to "
        f"{str(folder)!r} from a machine that has one, or omit download=True and root for the sample "
        f"that is part of TorchMN."
    )


def _fetch_from(url: str, target: Path, sha256: str, max_bytes: int, max_seconds: float) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file, _progress() as progress:
            task = progress.add_task(f"downloading {target.name}", total=None)
            expected, received = 0, 0
            for total, chunk in _received(url, max_seconds):
                expected, received = total, received + len(chunk)
                if max(expected, received) > max_bytes:
                    raise DatasetError(f"expected at most {max_bytes} bytes, got {max(expected, received)}")
                file.write(chunk)
                progress.update(task, completed=received, total=expected or None)
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


def _received(url: str, max_seconds: float) -> Iterator[tuple[int, bytes]]:
    """Yields the announced size, 0 if there is none, and each part of a file that another thread downloads.

    A server that sends a byte from time to time can keep any call of urllib busy indefinitely, so this thread waits for
    the other one only. That one ends with the connection, or with the process.
    """
    parts: queue.SimpleQueue[tuple[int, bytes] | Exception | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def download() -> None:
        try:
            with urllib.request.urlopen(url, timeout=SECONDS_WITHOUT_DATA) as reply:
                length = reply.headers.get("Content-Length") or ""
                total = int(length) if length.isdecimal() else 0
                parts.put((total, b""))
                while not stopped.is_set() and (chunk := reply.read1(CHUNK)):
                    parts.put((total, chunk))
            parts.put(None)
        except Exception as error:
            parts.put(error)

    threading.Thread(target=download, name="torchmn-download", daemon=True).start()
    deadline = monotonic() + max_seconds
    try:
        while True:
            try:
                part = parts.get(timeout=max(deadline - monotonic(), 0))
            except queue.Empty:
                raise DatasetError(f"not complete after {max_seconds:g} s") from None
            if part is None:
                return
            if isinstance(part, Exception):
                raise part
            yield part
    finally:
        stopped.set()


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, console=Console(stderr=True))


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"no connection ({error.reason})"
    return str(error) or type(error).__name__
