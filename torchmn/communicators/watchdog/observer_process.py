"""Process beside a rank of an MPI job, which reports what the rank cannot: MPI blocks it, or it has ended.

    python -I -S observer_process.py JOB RANK PROCESS SIZE SECONDS

It uses the standard library only, so that it starts fast. Its input is a pipe from its rank.

1. While ranks meet for the first time, MPI blocks Python in those that wait. If that exceeds SECONDS, or the launcher
   kills them, this process prints which ranks came.
2. When they have met, the first rank of each host passes the processes of that host's ranks on to it. It prints which
   of them ended first, and how, if that one could not report it: MPICH's mpiexec kills the others and names no rank.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic

ALL_MET = b"\n"  # for the observers with nothing further to do
JOB_ENDS = b"end"  # datagram to the observer of a host: no further report is necessary
_STOPPED_BY_USER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUT_OF_MEMORY = " (the kernel does that, too, when memory runs out: see `dmesg`)"
_GET_INFO = 0xC040FF0B  # ioctl PIDFD_GET_INFO with the first 64 bytes of its struct
_INFO_EXIT = 8
_LOOK_SECONDS = 1
_TABLE_SECONDS = 10.0  # a rank that waits for a stopped one reports more: it comes first
_EXIT_CODE = struct.Struct("<Q52xi")  # its mask, and a status as that of waitpid


def main() -> None:
    job, rank, process, size, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
    parent = _open_process(process)
    here = bound(f"{job}-rank-{rank}")
    ready = select.select([0], [], [], seconds)[0]
    line = sys.stdin.buffer.readline() if ready else b""
    if line:
        here.close()
        if line != ALL_MET:
            content = json.loads(line)
            processes = {int(each): pid for each, pid in content["processes"].items()}
            _watch_exits(content["name"], size, processes, StoppedProcesses(seconds))
        return
    how = exit_text(parent, process) if ready and parent is not None else None
    if ready and (how is None or any(signum.name in how for signum in _STOPPED_BY_USER)):
        return
    claim = bound(f"{job}-missing")
    if claim.getsockname():  # no other rank prints it
        _print(missing_text(rank, size, seconds, ranks_that_came(job), how))
        while len(ranks_that_came(job)) > 1 and select.select([0], [], [], 0.2)[0] == []:
            pass  # ranks that came later must not print it again


def bound(name: str) -> socket.socket:
    """Returns a socket for datagrams with a name of this host, or with none if another process has that name."""
    result = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with suppress(OSError):
        result.bind(address(name))
    return result


def address(name: str) -> str:
    return f"\0torchmn-{name}"


def ranks_that_came(job: str) -> list[int]:
    """Returns the ranks of this host whose observers still wait for others."""
    names = Path("/proc/net/unix").read_text()
    return sorted(int(rank) for rank in re.findall(rf"@torchmn-{re.escape(job)}-rank-(\d+)$", names, re.MULTILINE))


def missing_text(rank: int, size: int, seconds: float, came: list[int], how: str | None) -> str:
    """Returns the line on ranks that did not meet.

    Args:
        rank: that prints it.
        size: number of ranks of the job.
        seconds: the timeout.
        came: ranks of this host that create their communicator.
        how: this rank ended; None if it waits.
    """
    missing = ", ".join(str(each) for each in range(size) if each not in came)
    when = f"before the timeout (TORCHMN_TIMEOUT, {seconds:g} s)" if how is None else f"before this rank {how}"
    on_one_host = os.environ.get("MPI_LOCALNRANKS", os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")) == str(size)
    start = f"rank {rank} of {size}: create_communicator: {len(came)} of {size} ranks came {when}"
    if not missing:
        return f"{start}, but MPI does not connect them. Check the network of this host with `torchmn doctor`"
    hosts = "" if on_one_host else f" on host {socket.gethostname()}"
    network = "" if on_one_host else ", and that hosts reach each other (`torchmn doctor`)"
    plural = "s" * (", " in missing)
    return (
        f"{start}{hosts}, rank{plural} {missing} did not. Look at the output of rank{plural} {missing}, and check that "
        f"every rank calls create_communicator{network}"
    )


class StoppedProcesses:
    """Finds processes that have been stopped (SIGSTOP) for more than `seconds`: their own watchdogs are, too.

    Attributes:
        text: on such a process, after its rank.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._since: dict[int, float] = {}
        self._next = 0.0
        self.text = f"has been stopped (SIGSTOP) for more than {seconds:g} s (TORCHMN_TIMEOUT); the job is ended"

    def find(self, processes: Mapping[int, int]) -> int | None:
        """Returns the rank of such a process, of process ids by rank; looks once a second."""
        now = monotonic()
        if now < self._next:
            return None
        self._next = now + _LOOK_SECONDS
        for rank, pid in processes.items():
            if _fields(pid)[:1] != ["T"]:
                self._since.pop(rank, None)
            elif now - self._since.setdefault(rank, now) > self._seconds + _TABLE_SECONDS:
                return rank
        return None


def _watch_exits(name: str, size: int, processes: dict[int, int], stopped: StoppedProcesses) -> None:
    """Prints which of these processes, by rank, ended first, if it failed and did not announce its end at `name`.

    Kills a process that is stopped for too long.
    """
    announced = bound(name)
    opened = {rank: _open_process(pid) for rank, pid in processes.items()}
    waiting = {descriptor: rank for rank, descriptor in opened.items() if descriptor is not None}
    poller = select.poll()
    for descriptor in (announced.fileno(), *waiting):
        poller.register(descriptor, select.POLLIN)
    if os.fork():  # the rank waits until here; then this is no child of it, because its script may wait for children
        return
    while waiting:
        ready = [descriptor for descriptor, _ in poller.poll(1000 * _LOOK_SECONDS)]
        rank = stopped.find({rank: processes[rank] for rank in waiting.values()})
        if rank is not None:
            _print(f"rank {rank} of {size} (process {processes[rank]} on {socket.gethostname()}) {stopped.text}")
            os.kill(processes[rank], signal.SIGKILL)  # at which the launcher ends the others
            return
        if announced.fileno() in ready:
            return
        ended = {waiting.pop(descriptor): descriptor for descriptor in ready}
        failed = {rank: exit_text(descriptor, processes[rank]) for rank, descriptor in ended.items()}
        texts = [
            f"rank {rank} of {size} (process {processes[rank]} on {socket.gethostname()}) {how}"
            for rank, how in failed.items()
            if how
        ]
        if texts:
            _print("; ".join(texts))
            return
        for descriptor in ended.values():
            poller.unregister(descriptor)


def _open_process(pid: int) -> int | None:
    """Returns a descriptor that becomes readable when the process ends; None on systems without."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def exit_text(descriptor: int, pid: int) -> str | None:
    """Returns how a process ended; None if its status was 0, or if it is not known because its launcher was faster."""
    status = _status_of_unreaped(pid)
    if status is None:
        status = _status_of_reaped(descriptor)
    if not status:
        return None
    if status & 0x7F:
        name = signal.Signals(status & 0x7F).name
        return f"was ended by {name}{_OUT_OF_MEMORY if name == 'SIGKILL' else ''}"
    return f"ended with status {status >> 8}"


def _status_of_unreaped(pid: int) -> int | None:
    """Returns the status of an ended process until its parent has waited for it."""
    fields = _fields(pid)
    return int(fields[-1]) if fields[:1] in (["Z"], ["X"]) else None


def _fields(pid: int) -> list[str]:
    """Returns what Linux lists about a process, from its state on; nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _status_of_reaped(descriptor: int) -> int | None:
    """Returns the status of an ended process after its parent has waited for it, since Linux 6.15."""
    info = bytearray(struct.pack("<Q56x", _INFO_EXIT))
    with suppress(OSError):
        fcntl.ioctl(descriptor, _GET_INFO, info)
        mask, status = _EXIT_CODE.unpack(info)
        return status if mask & _INFO_EXIT else None
    return None


def _print(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"torchmn: {text}\n".encode())


if __name__ == "__main__":
    main()
