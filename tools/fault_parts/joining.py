"""An unprivileged user of the host who knows a job's ports tries to join it as rank 1: `run`. Needs root."""

from __future__ import annotations

import encodings.idna as encodings_idna
import hmac
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tests._worlds.launch import LABEL, clean_environment, labelled
from torchmn.communicators.watchdog.control_channel import ControlClient

ROOT = Path(__file__).resolve().parents[2]
LOADED = (encodings_idna, hmac)  # of sockets and of keys: the other user may not be able to read Python's files
NOBODY = 65534
SECONDS = 180.0
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHMN_TIMEOUT": "20"}
ERRORS = ("does not have the secret of this job", "gloo does not connect the ranks")
HELD = ("gloo", "watchdog")
"""Where rank 1 of a job is held back while the other user tries to take its place."""
# A real job of two ranks; rank 1 waits before it connects by `held`.
JOB = """
import os, sys, time
from pathlib import Path
import torchmn
from torchmn.communicators.transports import gloo
from torchmn.communicators.watchdog.control_channel import ControlClient
directory, held = Path(sys.argv[1]), sys.argv[2]
rank = int(next(os.environ[name] for name in ("PMI_RANK", "RANK") if name in os.environ))
def late(function):
    def call(*arguments, **options):
        if rank == 1:
            while not (directory / "go").exists(): time.sleep(0.01)
        return function(*arguments, **options)
    return call
if held == "gloo": gloo.connect = late(gloo.connect)
else: ControlClient.__init__ = late(ControlClient.__init__)
(directory / f"process-{rank}").write_text(f"{os.getpid()} {os.environ.get('TORCHMN_STORE', '')}")
comm = torchmn.create_communicator()
print("SUM", sum(comm.allgather_obj(1 + comm.rank)), flush=True)
"""


class Command:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


class Result(NamedTuple):
    """What the other user reached.

    Attributes:
        transport, held: of the job.
        ports: that were open.
        attempts: what was tried, and what came of it.
        status: of the job.
        completed: whether the job computed what it should.
        refused: whether nothing was run or read, and the job completed, or ended with an error about the connection.
    """

    transport: str
    held: str
    ports: list[int]
    attempts: list[str]
    status: int
    completed: bool
    refused: bool
    output: str


def run(number: int) -> Result:
    """Returns the result of one job; its transport and the place of the attempt depend on `number`."""
    transport, held = [("gloo", "gloo"), ("gloo", "watchdog"), ("mpi", "watchdog")][number % 3]
    with tempfile.TemporaryDirectory(prefix="torchmn-faults-") as name:
        directory, label, trace = Path(name), uuid.uuid4().hex, f"/tmp/torchmn-joined-{uuid.uuid4().hex}"
        (directory / "job.py").write_text(JOB)
        with (directory / "output").open("wb") as output:
            command = [sys.executable, "-m", "torchmn.cli.main", "run", "-n", "2", "--transport", transport, "job.py"]
            process = subprocess.Popen(
                [*command, name, held],
                env=clean_environment() | ENVIRONMENT | {LABEL: label},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=name,
                start_new_session=True,
            )
            ports, store = _wait_for_ports(directory, process)
            attempts = as_nobody(lambda: attempt(ports, store, trace))
            (directory / "go").touch()
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
            for left in labelled(label):
                with suppress(psutil.Error):
                    left.kill()
        text = (directory / "output").read_text(errors="replace")
        completed = process.wait() == 0 and text.count("SUM 3") == 2
        refused = bool(ports) and not os.path.exists(trace) and not any("JOINED" in each for each in attempts)
        refused = refused and (completed or any(error in text for error in ERRORS))
        with suppress(OSError):
            os.unlink(trace)
        return Result(transport, held, ports, attempts, process.wait(), completed, refused, text)


def _wait_for_ports(directory: Path, process: subprocess.Popen[bytes]) -> tuple[list[int], str]:
    """Returns the ports on which rank 0 listens while it waits for rank 1, and the path of the job's store."""
    deadline, ports, store = time.monotonic() + SECONDS, [], ""
    while not ports and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
        with suppress(OSError, psutil.Error, ValueError):
            pid, store = (directory / "process-0").read_text().split(" ")
            connections = psutil.Process(int(pid)).net_connections()
            ports = [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]
    return sorted(set(ports)), store


def as_nobody(action: object) -> list[str]:
    """Returns the list that `action` returns in a process of the user nobody."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, json.dumps(action()).encode())  # pyright: ignore[reportCallIssue]
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        content = file.read()
    os.waitpid(child, 0)
    return json.loads(content)


def attempt(ports: Sequence[int], store: str, trace: str) -> list[str]:
    """Returns what came of each attempt to join: `JOINED` or the reason of the refusal."""
    assert os.geteuid() == NOBODY
    found: list[str] = []
    if store:
        try:
            found.append(f"JOINED: read {len(Path(store).read_bytes())} bytes of the store")
        except OSError as error:
            found.append(f"store: {error.strerror}")
    for port in ports:
        try:
            client = ControlClient(1, ["127.0.0.1"], port, os.urandom(16), seconds=3)
            client.send({"kind": "end", "rank": 1, "status": 1})
            found.append(f"JOINED: {port} accepted a random key")
        except Exception as error:
            found.append(f"{port}: {str(error) or type(error).__name__}"[:200])
        found += [_pretend(port, number, trace) for number in range(8)]
    return found


def _pretend(port: int, number: int, trace: str) -> str:
    """Connects as the peer of gloo's connection `number`, and sends a command to be unpickled."""
    command = pickle.dumps(Command(trace))
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
            connection.sendall(number.to_bytes(8, sys.byteorder))
            for _ in range(3):
                connection.sendall(len(command).to_bytes(4, "big") + command)
            connection.settimeout(0.2)
            return f"{port}, as {number}: received {len(connection.recv(1024))} bytes"
    except OSError as error:
        return f"{port}, as {number}: {error}"
