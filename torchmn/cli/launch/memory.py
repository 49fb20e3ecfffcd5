"""Checks that the ranks of a job fit into memory, before the kernel's out-of-memory killer ends other processes."""

from __future__ import annotations

from pathlib import Path

from torchmn.errors import LaunchError

MEGABYTE = 10**6
RANK_BYTES = 250 * MEGABYTE
"""Memory of a rank with torch imported and a communicator created, without data."""
CGROUP = Path("/sys/fs/cgroup")


def check_memory(ranks: int, anyway: bool) -> None:
    """Raises a LaunchError if `ranks` ranks do not fit into the free memory, unless `anyway`."""
    free = free_memory()
    if anyway or free is None or ranks * RANK_BYTES <= free:
        return
    fit = max(free // RANK_BYTES, 1)
    need = f"{_gigabytes(ranks * RANK_BYTES)} of memory ({RANK_BYTES // MEGABYTE} MB each, without data)"
    raise LaunchError(
        f"-n {ranks}: {ranks} ranks need about {need}, and {_gigabytes(free)} are free. Use at most -n {fit}, or "
        "--anyway to start them all"
    )


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int | None:
    """Returns the bytes available to new processes, within the limit of a container; None if unknown."""
    try:
        lines = (line.split() for line in meminfo.read_text().splitlines())
        free = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text())
        # The page cache counts as used, but is released on demand.
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
        used = int((cgroup / "memory.current").read_text()) - cached
    except (OSError, ValueError, KeyError):  # not in a container, or in one without a limit
        return free
    return max(min(free, limit - used), 0)


def _gigabytes(size: int) -> str:
    return f"{size / 10**9:.1f} GB"
