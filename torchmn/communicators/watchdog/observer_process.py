"""Process beside a rank of an MPI job, which reports what the rank cannot: MPI blocks it, or it has ended.

    python -I -S observer_process.py JOB RANK PROCESS SIZE SECONDS VARIABLE

It uses the standard library only, so that it starts fast. Its input is a pipe from its rank.

1. While ranks meet for the first time, MPI blocks Python in those that wait. If that exceeds SECONDS, this process
   prints which ranks came. If a rank of this host ends meanwhile, it prints which one, and how, and ends its rank.
2. When they have met, the first rank of each host passes the processes of that host's ranks on to it. It prints which
   of them ended first, and how, if that one could not report it: MPICH's mpiexec kills the others and names no rank.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

ALL_MET = b"\n"  # for the observers with nothing further to do
JOB_ENDS = b"end"  # datagram to the observer of a host: no further report is necessary
_STOPPED_BY_USER = re.compile("SIGINT|SIGTERM|SIGHUP")
OWN_FILE = "/dev/shm/torchmn-"  # beginning of the names of files of TorchMN; the process follows
_MPICH_FILE = re.compile(r"(/dev/shm/mpich_(?:shm|vci)_[0-9a-f]+_\d+)$", re.MULTILINE)
_OUT_OF_MEMORY = " (the kernel does that, too, when memory runs out: see `dmesg`)"
_NAMESPACE = "PMIX_NAMESPACE"  # of the job, if its launcher may serve several
REPORTS_EXITS = "TORCHMN_RUN_REPORTS_EXITS"  # launchers.environment has it for the rest of the package
_GET_INFO = 0xC040FF0B  # ioctl PIDFD_GET_INFO with the first 64 bytes of its struct
_INFO_EXIT = 8
_LOOK_SECONDS = 1
_MEETING_SECONDS = 0.1  # MPI creates its shared memory when all ranks have come
_LAST_SECONDS = 2.0  # a rank that has ended may have met the others just before
_TABLE_SECONDS = 10.0  # a rank that waits for a stopped one reports more: it comes first
_EXIT_CODE = struct.Struct("<Q52xi")  # its mask, and a status as that of waitpid


def main() -> None:
    job, rank, process, size, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
    here = bound(f"{job}-rank-{rank}")
    found = {} if REPORTS_EXITS in os.environ else started_ranks(int(job.partition("-")[0]), sys.argv[6])
    processes = {**found, rank: process}
    absent = set(range(size)) - set(found) if rank in found and is_on_one_host(size) else set()
    meeting = Meeting(rank, processes, absent)
    line = meeting.wait(seconds)
    if line:
        here.close()
        if line != ALL_MET:
            content = json.loads(line)
            processes = {int(each): pid for each, pid in content["processes"].items()}
            _watch_exits(content["name"], size, processes, StoppedProcesses(seconds))
        return
    meeting.unlink_shared_memory()
    ended = meeting.ended
    ended_by_itself = line is not None and ended in ({}, {rank: None})
    if ended_by_itself or _STOPPED_BY_USER.search(str(ended)):
        return
    claim = bound(f"{job}-missing")
    if claim.getsockname():  # no other rank prints it
        if ended:
            _print(f"{ended_text(ended, size, processes)} before all ranks had met in create_communicator")
        else:
            _print(missing_text(rank, size, seconds, ranks_that_came(job), processes))
    if ended and rank not in ended:  # MPI would wait for that rank indefinitely
        with suppress(OSError):
            os.kill(process, signal.SIGTERM)
    deadline = monotonic() + _TABLE_SECONDS
    while claim.getsockname() and len(ranks_that_came(job)) > 1 and monotonic() < deadline:
        sleep(0.2)  # other observers must not print it again


def started_ranks(launcher: int, variable: str) -> dict[int, int]:
    """Returns the process that a launcher has started for each rank of this job on this host that still runs.

    Args:
        launcher: its process.
        variable: the environment variable of the rank.
    """
    found: dict[int, int] = {}
    for path in Path(f"/proc/{launcher}/task").glob("*/children"):
        try:
            for pid in map(int, path.read_text().split()):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                    content = Path(f"/proc/{pid}/environ").read_text(errors="replace")
                    environ = dict(each.split("=", 1) for each in content.split("\0") if "=" in each)
                    if variable in environ and environ.get(_NAMESPACE) == os.environ.get(_NAMESPACE):
                        found[int(environ[variable])] = pid
        except (OSError, ValueError):  # another user's process
            return {}
    return found


def is_on_one_host(size: int) -> bool:
    """Returns whether all ranks of the job are on this host, as far as their launcher's variables show it."""
    return os.environ.get("MPI_LOCALNRANKS", os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")) == str(size)


class Meeting:
    """The first contact of all ranks, in which MPI may block them.

    Args:
        rank: of this observer.
        processes: of the ranks of this host, by rank.
        absent: ranks that have ended before.

    Attributes:
        ended: how the ranks ended that did so first, if any has; None if that is not known.
    """

    def __init__(self, rank: int, processes: Mapping[int, int], absent: Iterable[int]):
        self.ended: dict[int, str | None] = dict.fromkeys(absent)
        self._rank = rank
        self._processes = processes
        self._shared_memory: set[str] = set()

    def wait(self, seconds: float) -> bytes | None:
        """Returns the line of this rank when ranks have met; empty if that rank has ended, None after `seconds`."""
        line = None
        opened = {_open_process(pid): rank for rank, pid in self._processes.items()}
        poller = select.poll()
        for descriptor in (0, *filter(None, opened)):
            poller.register(descriptor, select.POLLIN)
        deadline = monotonic() + (min(seconds, _LAST_SECONDS) if self.ended else seconds)
        while (left := deadline - monotonic()) > 0:
            pause = _LOOK_SECONDS if self._shared_memory else _MEETING_SECONDS
            ready = [descriptor for descriptor, _ in poller.poll(1000 * min(left, pause))]
            if not self.ended:
                gone = {opened[descriptor]: descriptor for descriptor in ready if descriptor}
                self.ended = {rank: exit_text(gone[rank], self._processes[rank]) for rank in gone}
            if 0 in ready:
                line = sys.stdin.buffer.readline()
                if line or self.ended:
                    return line
            for descriptor in ready:
                poller.unregister(descriptor)
                deadline = min(deadline, monotonic() + _LAST_SECONDS)
            if not self._shared_memory:
                self._shared_memory = shared_memory_files(self._processes[self._rank])
        return line

    def unlink_shared_memory(self) -> None:
        """Removes the names of shared memory: the ranks will be ended before they do."""
        unlink_files(self._shared_memory)
        unlink_own_files(self._processes.values())


def shared_memory_files(process: int | str) -> set[str]:
    """Returns the files in shared memory, of about 2 MB, in which the ranks of MPICH on this host meet."""
    try:
        return set(_MPICH_FILE.findall(Path(f"/proc/{process}/maps").read_text(errors="replace")))
    except OSError:  # it has ended, or this system has no /proc
        return set()


def unlink_own_files(processes: Iterable[int]) -> None:
    """Removes files in shared memory that processes of ranks have created, and that not all ranks have mapped yet."""
    for process in processes:
        unlink_files(glob.glob(f"{OWN_FILE}{process}-*"))


def unlink_files(paths: Iterable[str]) -> None:
    """Removes files, if they still exist."""
    for path in paths:
        with suppress(OSError):  # another process was first
            os.unlink(path)


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


def ended_text(ended: Mapping[int, str | None], size: int, processes: Mapping[int, int]) -> str:
    """Returns which ranks have ended, and how.

    Args:
        ended: how each of them has, by rank; None if that is not known.
        size: number of ranks of the job.
        processes: of the ranks, by rank, as far as they are known.
    """
    host = socket.gethostname()
    where = {rank: f" (process {processes[rank]} on {host})" for rank in ended if rank in processes}
    return "; ".join(f"rank {rank} of {size}{where.get(rank, '')} {how or 'has ended'}" for rank, how in ended.items())


def missing_text(rank: int, size: int, seconds: float, came: list[int], processes: Mapping[int, int]) -> str:
    """Returns the line on ranks that did not meet before the timeout.

    Args:
        rank: that prints it.
        size: number of ranks of the job.
        seconds: the timeout.
        came: ranks of this host that create their communicator.
        processes: of the ranks of this host, by rank.
    """
    absent = [each for each in range(size) if each not in came]
    missing = ", ".join(map(str, absent))
    on_one_host = is_on_one_host(size)
    start = (
        f"rank {rank} of {size}: create_communicator: {len(came)} of {size} ranks came before the timeout "
        f"(TORCHMN_TIMEOUT, {seconds:g} s)"
    )
    stopped = [
        f"rank {each} (process {pid}) is stopped (SIGSTOP)" for each, pid in processes.items() if is_stopped(pid)
    ]
    if stopped:
        return f"{start}: {', '.join(stopped)}"
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
            if not is_stopped(pid):
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
        how = {rank: exit_text(descriptor, processes[rank]) for rank, descriptor in ended.items()}
        failed = {rank: text for rank, text in how.items() if text}
        if failed:
            _print(ended_text(failed, size, processes))
            unlink_own_files(processes.values())
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


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, by SIGSTOP for example."""
    return _fields(pid)[:1] == ["T"]


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
