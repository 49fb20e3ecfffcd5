"""Other users of the host reach neither the store of a gloo job, nor its ports, and nothing of theirs is unpickled."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests._worlds import ranks
from tests._worlds.jobs import run_job
from tests.cli.commands import run, script
from torchmn.communicators import communicator
from torchmn.communicators.transports import gloo
from torchmn.communicators.watchdog.control_channel import ControlClient, ControlServer
from torchmn.errors import LaunchError

LISTENS = """
import psutil
import torchmn
comm = torchmn.create_communicator()
group = comm.split(0, -comm.rank)
own = psutil.Process().net_connections()
places = {each.laddr.ip for each in own if each.status == psutil.CONN_LISTEN}
everything = {place for part in group.allgather_obj(places) for place in part}
"""

MEETS = (
    LISTENS
    + """
import socket, stat
store = os.environ["TORCHMN_STORE"]
mode = stat.S_IMODE(os.stat(os.path.dirname(store)).st_mode)
with socket.socket() as probe:
    refused = probe.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) != 0
total = sum(group.allgather_obj(rank))
if rank == 0:
    print("listens", sorted(everything), "mode", oct(mode), "refused", refused, "sum", total)
    print("store", store)
comm.barrier()
"""
)


@pytest.mark.parametrize("status", [0, 3])
def test_ranks_of_torchmn_run_use_a_store_that_no_other_user_can_read(status: int, tmp_path: Path) -> None:
    result = run("gloo", 2, script(tmp_path, MEETS + f"sys.exit({status})\n"))
    assert result.status == status, result.err
    assert "[0] listens ['127.0.0.1'] mode 0o700 refused True sum 1" in result.out, result.out
    store = Path(result.out.partition("[0] store ")[2].splitlines()[0])
    assert not store.parent.exists(), "it is removed with the job"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_read_the_store(tmp_path: Path) -> None:
    attempt = """
import subprocess
done = subprocess.run(["cat", store], user=65534, group=65534, extra_groups=[], capture_output=True, text=True)
if rank == 0:
    print("denied", done.returncode != 0 and "denied" in done.stderr, done)
comm.barrier()
"""
    shared = Path(tempfile.mkdtemp(prefix="torchmn-test-"))  # pytest's own directories are closed to others, too
    shared.chmod(0o755)
    try:
        result = run("gloo", 2, script(tmp_path, MEETS + attempt), env={"TMPDIR": str(shared), "LC_ALL": "C"})
    finally:
        shutil.rmtree(shared)
    assert result.status == 0 and "[0] denied True" in result.out, result.out + result.err


def test_ranks_on_one_host_listen_on_its_loopback_interface_alone() -> None:
    # In one piece: ranks share the output.
    result = run_job(LISTENS + "print(f'rank {comm.rank} {sorted(places)}\\n', end='', flush=True)", 2, "gloo")
    # Rank 0 holds torch's store, which listens everywhere.
    assert result.returncode == 0 and "rank 1 ['127.0.0.1']" in result.stdout, result.output


def test_a_program_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    program = script(tmp_path, "import torchmn\ntorchmn.create_communicator()", "program.py")
    starts = f"""
import subprocess, torchmn
comm = torchmn.create_communicator()
done = subprocess.run([sys.executable, {program!r}], capture_output=True, text=True)
assert done.returncode and "that a rank starts is no rank" in done.stderr, done.stderr
comm.barrier()
"""
    result = run("gloo", 2, script(tmp_path, starts))
    assert result.status == 0, result.err


def connected(secrets: list[bytes | None], seconds: float = 300) -> list[object]:
    """What each rank gets that connects with its own secret, or proves nothing: a group, or an error."""
    store = dist.HashStore()
    results: list[object] = [None] * len(secrets)

    def connect(rank: int) -> None:
        rendezvous = gloo.Rendezvous(store, "127.0.0.1", secrets[rank])
        try:
            results[rank] = gloo.connect(rendezvous, "world", rank, len(secrets), timedelta(seconds=seconds))
        except LaunchError as error:
            results[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(len(secrets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_process_without_the_secret_is_not_accepted_as_a_rank() -> None:
    results = connected([b"the job's", b"the job's", b"guessed"])
    for rank, result in enumerate(results):
        assert isinstance(result, LaunchError) and f"rank {rank} of 3" in str(result), result
    assert "as rank 2 does not have the secret" in str(results[0])
    assert "as rank 2 does not have the secret" in str(results[1])
    assert all(isinstance(group, dist.ProcessGroupGloo) for group in connected([b"the job's"] * 3))


def test_a_process_that_sends_no_proof_is_refused_within_the_timeout() -> None:
    result, _ = connected([b"the job's", None], seconds=3)
    assert isinstance(result, LaunchError) and "as rank 1 does not have the secret" in str(result)


@ranks(3)
def test_split_unpickles_nothing(comm, monkeypatch) -> None:
    def refuse(data, device):
        raise AssertionError("unpickled")

    monkeypatch.setattr(communicator, "unpack", refuse)
    group = comm.split(comm.rank % 2 - 10**30, -comm.rank)
    assert (group.size, group.rank) == {0: (2, 1), 1: (1, 0), 2: (2, 0)}[comm.rank]
    assert comm.split(None) is None


class Command:
    """Runs something when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("run-by-a-stranger",)


def test_a_stranger_at_the_watchdogs_port_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = ControlServer(1, to_other_hosts=False)
    words = pickle.dumps(Command())
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        with contextlib.suppress(ConnectionError):  # the server may have closed the connection already
            for _ in range(3):  # in place of an answer to the challenge, and of what may come after it
                stranger.sendall(len(words).to_bytes(4, "big") + words)
        rank = ControlClient(0, ["127.0.0.1"], server.port, server.key)
        rank.send({"kind": "hello", "rank": 0})
        assert rank.receive(20.0) == {"kind": "hello", "rank": 0}
    assert not (tmp_path / "run-by-a-stranger").exists()
