"""Whether so many ranks fit into this machine: one rank too many, and the system ends any process it likes."""

from __future__ import annotations

from pathlib import Path

from torchmn.errors import LaunchError

MEGABYTE = 10**6
OF_A_RANK = 250 * MEGABYTE
"""What a rank takes that has imported torch and found the others, before it has any data."""
GROUP = Path("/sys/fs/cgroup")


def check_memory(ranks: int, anyway: bool) -> None:
    """Raises a LaunchError that says how many ranks fit, where `ranks` do not; never with `anyway`."""
    free = free_memory()
    if anyway or free is None or ranks * OF_A_RANK <= free:
        return
    fit = max(free // OF_A_RANK, 1)
    need = f"{_gigabytes(ranks * OF_A_RANK)} of memory ({OF_A_RANK // MEGABYTE} MB each, without their data)"
    raise LaunchError(
        f"-n {ranks}: so many ranks need about {need}, and {_gigabytes(free)} are free: {fit} fit. Say -n {fit}, or "
        "--anyway to start them all"
    )


def free_memory(meminfo: Path = Path("/proc/meminfo"), group: Path = GROUP) -> int | None:
    """The bytes that new processes can take; None where the system does not tell. A container may have less."""
    try:
        lines = (line.split() for line in meminfo.read_text().splitlines())
        free = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    try:
        limit = int((group / "memory.max").read_text())
        # What is cached of files counts as used, and is given up when it is needed.
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
        used = int((group / "memory.current").read_text()) - cached
    except (OSError, ValueError, KeyError):  # no container, or one without a limit
        return free
    return max(min(free, limit - used), 0)


def _gigabytes(size: int) -> str:
    return f"{size / 10**9:.1f} GB"
