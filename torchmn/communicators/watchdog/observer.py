"""The rank's end of its observer process, which prints what the rank cannot: `Observer`."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchmn.communicators.launchers.environment import LAUNCHERS, REPORTS_EXITS, Launch
from torchmn.communicators.watchdog import observer_process

_LONGER = 2.0  # seconds after which a rank ends whose observer has printed why


class Observer:
    """Starts and instructs `observer_process`.

    Args:
        launch: what the launcher's environment variables contain.
        seconds: that ranks may take to meet.
    """

    def __init__(self, launch: Launch, seconds: float):
        self._seconds = seconds
        self._name: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        variable = next(row.rank for row in LAUNCHERS if row.name == launch.name)
        arguments = [_job(variable), *map(str, (launch.rank, os.getpid(), launch.size, seconds, variable))]
        with suppress(OSError):  # no further process at the moment: the launcher reports what it can
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", observer_process.__file__, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # launchers kill the sessions of ranks
            )

    @contextmanager
    def first_contact(self) -> Iterator[Observer]:
        """Context in which ranks meet; ends this process if that takes too long, with one line from its observer."""
        with suppress(Exception), open(os.devnull, "w") as unused:
            if self._process is not None:
                faulthandler.dump_traceback_later(self._seconds + _LONGER, exit=True, file=unused)
            else:
                faulthandler.dump_traceback_later(self._seconds, exit=True)
        try:
            yield self
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._send(observer_process.ALL_MET)  # no effect after `report_exits`

    def report_exits(self, rank: int, hosts: Sequence[str], processes: Sequence[int]) -> None:
        """Makes the observer of the first rank of each host report the ranks of its host that are killed or crash.

        Args:
            rank: of this process.
            hosts, processes: of all ranks.
        """
        if os.environ.get(REPORTS_EXITS):
            return
        here = {each: processes[each] for each, host in enumerate(hosts) if host == hosts[rank]}
        self._name = f"exits-{next(iter(here.values()))}"
        if rank == next(iter(here)):
            self._send(json.dumps({"name": self._name, "processes": here}).encode() + b"\n")

    def announce_end(self) -> None:
        """Announces that this rank has reported why the job ends."""
        if self._name is not None:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(observer_process.JOB_ENDS, observer_process.address(self._name))

    def _send(self, line: bytes) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.write(line)
                process.stdin.close()
            process.wait()  # what it does further is done by a fork


def _job(variable: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns a name that the ranks of this job on this host have in common: the process that started them all.

    Args:
        variable: the environment variable of the rank.
        environ: the environment variables.
    """
    pid = os.getppid()
    with suppress(OSError, ValueError):  # another user's process, such as Slurm's, is not one of the rank
        while f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    step = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return "-".join([str(pid), *filter(None, step)])
