"""A rank that raises, leaves, dies or is stuck ends the job at once, with the reason: fresh jobs of processes."""

from __future__ import annotations

import re
import tempfile
from itertools import product
from pathlib import Path

import pytest

from tests._worlds.jobs import JobResult, run_job

START = """
import os, signal, sys, time
import torch, torchmn
comm = torchmn.create_communicator()
x = torch.ones(4)
comm.barrier()
"""

PROCESSES = ("mpi", "openmpi", "gloo")
# A third rank, for which no rank waits, ends with the others; on one transport only, to save a start.
RANKS = {"mpi": 3, "openmpi": 2, "gloo": 2}


def job(body: str, n: int | None = None, transport: str = "mpi", **env: str) -> JobResult:
    """A job of `n` ranks that runs `body` after all of them have met."""
    n = RANKS[transport] if n is None else n
    result = run_job(START + body, n, transport, env=env)
    assert not result.timed_out, result.output
    assert not result.survivors, f"left behind: {result.survivors}"
    return result


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_rank_that_raises_ends_the_job_with_its_traceback_once(transport: str) -> None:
    result = job("if comm.rank == 1: raise RuntimeError('the reason')\ncomm.barrier()", transport=transport)
    assert result.returncode != 0
    assert f"rank 1 of {RANKS[transport]} raised; the job is ended" in result.output
    assert result.output.count("RuntimeError: the reason") == 1


@pytest.mark.parametrize(("leave", "transport"), [*product(["sys.exit(3)", "pass"], PROCESSES), ("sys.exit(0)", "mpi")])
def test_a_rank_that_leaves_while_others_wait_ends_the_job(leave: str, transport: str) -> None:
    body = f"if comm.rank == 1:\n    {leave}\nelse:\n    comm.recv(1, tag=5)"
    result = job(body, transport=transport, TORCHMN_TIMEOUT="40")
    assert result.returncode != 0
    if leave == "sys.exit(3)" and transport != "gloo":  # torchrun has one status for all failures
        assert result.returncode == 3
    assert "rank 1 left" in result.output
    assert "recv" in result.output


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_rank_0_that_leaves_is_reported_at_once_although_it_serves_the_control_channel(transport: str) -> None:
    body = "if comm.rank == 0: sys.exit(5)\ncomm.recv(0, tag=5)"
    result = job(body, transport=transport, TORCHMN_TIMEOUT="60")
    assert "rank 0 left with status 5" in result.output
    assert result.output.count("the job is ended") == 1
    assert "has waited for 60 s" not in result.output
    if transport == "mpi":  # torchrun has one status for all failures
        assert result.returncode == 5


@pytest.mark.parametrize("operation", ["comm.recv(0, tag=5)", "comm.recv_obj(0)", "image.get_fprop_view(tile)"])
def test_a_rank_that_was_gone_before_it_was_waited_for_is_an_error_that_says_so(operation: str) -> None:
    """The first operation waits until the connection breaks; the second one begins on a broken connection."""
    body = f"""
window = torchmn.geometry.Window(3, padding=(1, 1))
image = torchmn.GlobalArray(torchmn.ProcessGrid(comm, height=2), (8, 4), window)
tile = torch.ones(1, 1, 4, 4)
if comm.rank == 0: sys.exit(5)
for attempt in range(2):
    try: {operation}
    except torchmn.PeerError as error: print("ATTEMPT", attempt, error)
"""
    result = job(body, transport="gloo", TORCHMN_TIMEOUT="60", TORCHMN_CHECKS="0")
    for attempt in range(2):
        assert f"ATTEMPT {attempt} rank 1 of 2: " in result.stdout, result.output
    assert result.stdout.count("lost the connection to another rank, which ended or was killed") == 2


def test_a_rank_that_lost_another_waits_for_the_report_of_it_before_it_ends_the_job() -> None:
    """Rank 0 reports that it left only when rank 1 has lost its connection and looks for the reason."""
    script = """
import os, sys, threading
import torchmn
from torchmn.communicators.watchdog import monitor
from torchmn.communicators.watchdog.monitor import Monitor
searches, announce, wait = sys.argv[1], Monitor.announce_departure, Monitor.wait_for_root_cause
def announce_late(self):
    def when_searched():
        while not os.path.exists(searches): pass
        announce(self)
    threading.Thread(target=when_searched).start()
def search(self):
    open(searches, "w").close()
    wait(self)
monitor._REPLY_SECONDS = 50
Monitor.announce_departure, Monitor.wait_for_root_cause = announce_late, search
comm = torchmn.create_communicator()
comm.barrier()
if comm.rank == 0: sys.exit(5)
comm.recv(0)
"""
    with tempfile.TemporaryDirectory() as directory:
        result = run_job(script, 2, "gloo", args=[f"{directory}/searches"], env={"TORCHMN_TIMEOUT": "60"})
    assert not result.timed_out, result.output
    assert "rank 0 left with status 5" in result.output, result.output
    assert result.output.count("the job is ended") == 1


@pytest.mark.parametrize("status", [0, 7])
def test_a_rank_that_calls_os_exit_is_named_and_is_not_a_success(status: int) -> None:
    result = job(f"if comm.rank == 1: os._exit({status})\ncomm.barrier()")
    assert result.returncode != 0
    assert f"rank 1 of 3 called os._exit({status})" in result.output


ENDINGS = {
    "import ctypes; ctypes.CDLL(None)._exit(7)": "ended with status 7",
    "os.kill(os.getpid(), signal.SIGKILL)": "was ended by SIGKILL",
    "import atexit, ctypes; atexit.register(ctypes.CDLL(None)._exit, 7); sys.exit(0)": "ended with status 7",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_can_report_nothing_is_named_with_its_status_or_signal(ending: str) -> None:
    """MPICH's mpiexec kills the other ranks at once, and names none."""
    result = job(f"if comm.rank == 1:\n    {ending}\ncomm.barrier()")
    assert result.returncode != 0
    assert re.search(rf"torchmn: rank 1 of 3 \(process \d+ on \S+\) {ENDINGS[ending]}", result.output), result.output
    assert "rank 0 of 3" not in result.output and "rank 2 of 3" not in result.output


@pytest.mark.parametrize("transport", PROCESSES)
def test_ranks_that_are_missing_at_the_start_are_named(transport: str) -> None:
    n = RANKS[transport]
    script = """
import os
rank = next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK") if name in os.environ)
if rank == "1":
    while "RANK" not in os.environ: pass
    os._exit(0)
import torchmn
torchmn.create_communicator()
"""
    # Ranks that are forks of a server for tests have no process of the launcher in common.
    result = run_job(script, n, transport, env={"TORCHMN_TIMEOUT": "5", "TORCHMN_TEST_WARM_START": "0"})
    assert not result.timed_out, result.output
    assert result.returncode != 0
    assert result.output.count(f"{n - 1} of {n} ranks came before the timeout (TORCHMN_TIMEOUT") >= 1, result.output
    assert "rank 1 did not" in result.output
    assert "every rank calls create_communicator" in result.output
    assert "most recent call first" not in result.output  # the stack of a rank that was ended


def test_a_rank_that_ends_before_all_have_met_is_named_and_ends_the_job_at_once() -> None:
    """MPICH's mpiexec does not end the others, which MPI_Init would block until the timeout."""
    script = """
import os, sys
if os.environ["PMI_RANK"] == "1":
    while not os.path.exists(sys.argv[1]): pass
    os._exit(7)
import torchmn
from torchmn.communicators.watchdog.observer import Observer
meet = Observer.first_contact
def first_contact(self):
    open(sys.argv[1], "w").close()
    return meet(self)
Observer.first_contact = first_contact
torchmn.create_communicator()
"""
    with tempfile.TemporaryDirectory() as directory:
        options = {"TORCHMN_TIMEOUT": "600", "TORCHMN_TEST_WARM_START": "0"}
        result = run_job(script, 2, "mpi", args=[f"{directory}/waits"], env=options)
    assert not result.timed_out, result.output
    assert result.returncode != 0
    named = r"torchmn: rank 1 of 2 (\(process \d+ on \S+\) ended with status 7|has ended) before all ranks had met"
    assert re.search(named, result.output), result.output


THREAD = """
import threading
def upload():
    while True: time.sleep(1)
if comm.rank == 1: threading.Thread(target=upload, name="uploader").start()
"""
EARLIER_HANDLER = """
import atexit, time
def store(rank):
    while rank: time.sleep(1)
atexit.register(lambda: store(comm.rank))
"""


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
@pytest.mark.parametrize(
    ("script", "named"),
    [
        (START + THREAD, "thread 'uploader' at "),
        (EARLIER_HANDLER + START, "the exit handler at "),
        (START + EARLIER_HANDLER, "the exit handler at "),
    ],
    ids=["a thread", "an exit handler registered before", "an exit handler registered after"],
)
def test_a_process_that_does_not_end_after_its_script_is_reported_with_the_line(
    script: str, named: str, transport: str
) -> None:
    result = run_job(script, 2, transport, env={"TORCHMN_TIMEOUT": "3"})
    assert not result.timed_out, result.output
    assert result.returncode != 0
    assert "the script of rank 1 ended more than 3 s ago, but not " + named in result.output
    assert "in upload" in result.output or "in store" in result.output


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_rank_that_is_killed_ends_the_job(transport: str) -> None:
    result = job(
        "if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ncomm.barrier()",
        transport=transport,
        TORCHMN_TIMEOUT="40",
    )
    assert result.returncode != 0


def test_without_the_abort_hook_an_exception_is_left_to_the_launcher() -> None:
    body = "if comm.rank == 1: raise RuntimeError('the reason')"
    result = job(body, n=2, TORCHMN_ABORT="0")
    assert "RuntimeError: the reason" in result.output
    assert "the job is ended" not in result.output


@pytest.mark.parametrize("transport", PROCESSES)
def test_two_ranks_that_both_receive_are_named_as_a_deadlock_once(transport: str) -> None:
    result = job("comm.recv(1 - comm.rank, tag=3)", n=2, transport=transport, TORCHMN_TIMEOUT="2")
    assert result.returncode != 0
    assert result.output.count("has waited for 2 s in recv; the job is ended") == 1
    assert "deadlock: rank 0 waits for rank 1 waits for rank 0" in result.output
    for rank in range(2):
        assert re.search(
            rf"{rank} +\S+ +recv +rank {1 - rank} +3 +\d\.\d +\S*script\.py:\d+ in <module>", result.output
        )


def test_a_broadcast_that_one_rank_never_joins_names_that_rank() -> None:
    result = job("comm.bcast(x) if comm.rank != 1 else comm.recv(0, tag=7)", TORCHMN_TIMEOUT="2")
    assert "deadlock: rank 0 waits for rank 1 waits for rank 0" in result.output
    assert re.search(r"0 +\S+ +bcast +all", result.output)
    assert re.search(r"1 +\S+ +recv +rank 0 +7", result.output)


def test_a_rank_asleep_in_user_code_is_shown_with_its_line() -> None:
    body = "def nap():\n    time.sleep(60)\nif comm.rank == 1: nap()\ncomm.allreduce(x)"
    result = job(body, TORCHMN_TIMEOUT="2")
    assert "the others wait for rank 1" in result.output
    assert re.search(r"1 +\S+ +user code +\S*script\.py:\d+ in nap", result.output)


def test_a_stopped_rank_is_named() -> None:
    body = "if comm.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\ncomm.allreduce(x)"
    result = job(body, TORCHMN_TIMEOUT="2")
    assert "rank 1 does not answer: it is stopped (SIGSTOP)" in result.output


def test_an_exception_in_an_exit_handler_names_the_rank() -> None:
    body = "import atexit\ndef fail():\n    raise RuntimeError('the reason')\nif comm.rank == 1: atexit.register(fail)"
    result = job(body)
    assert result.output.count("torchmn: rank 1 of 3 raised in an exit handler:") == 1
    assert "RuntimeError: the reason" in result.output


def test_ranks_that_call_different_collectives_get_an_error_that_names_both() -> None:
    result = job("comm.allreduce(x) if comm.rank else comm.bcast(x)", TORCHMN_TIMEOUT="20")
    assert "ranks call different operations" in result.output
    assert "rank 0: bcast(root 0)" in result.output
    assert "ranks 1-2: allreduce(dtype torch.float32, shape (4,), op sum)" in result.output


def test_different_collectives_with_the_checks_off_end_in_the_table() -> None:
    body = "comm.barrier() if comm.rank else comm.recv(1)"
    result = job(body, n=2, TORCHMN_TIMEOUT="2", TORCHMN_CHECKS="0")
    assert "deadlock: rank 0 waits for rank 1 waits for rank 0" in result.output


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_message_that_nobody_receives_is_an_error_at_the_end(transport: str) -> None:
    body = "if comm.rank == 0: comm.send(torch.ones(1 << 20), 1, tag=9)\nelse: time.sleep(1)  # until it was sent"
    result = job(body, n=2, transport=transport, TORCHMN_TIMEOUT="40")
    assert result.returncode != 0, result.output
    assert "rank 1" in result.output
    assert "9" in result.output


def test_a_message_that_was_lost_before_the_end_is_an_error_at_the_end() -> None:
    body = "if comm.rank == 0:\n    comm.send(torch.ones(1 << 20), 1, tag=9)\n    time.sleep(2)"
    result = job(body, n=2, transport="gloo", TORCHMN_TIMEOUT="40")
    assert result.returncode != 0
    assert "rank 1 ended before it received a message, tag 9" in result.output


def test_a_message_to_a_rank_that_has_left_is_an_error_that_names_it() -> None:
    body = """
pid = comm.bcast_obj(os.getpid(), 1)
if comm.rank == 0:
    while os.path.exists(f"/proc/{pid}"): pass
    comm.send(torch.ones(1 << 20), 1, tag=9)
"""
    result = job(body, n=2, transport="gloo", TORCHMN_TIMEOUT="40")
    assert result.returncode != 0
    assert "PeerError: rank 1 ended before it received a message, tag 9" in result.output


@pytest.mark.parametrize("transport", PROCESSES)
def test_messages_still_on_their_way_at_the_end_are_delivered(transport: str) -> None:
    body = """
if comm.rank == 0:
    for tag in range(3): comm.send(torch.full((1 << 18,), float(tag)), 1, tag)
else:
    time.sleep(1)
    for tag in (2, 0, 1): assert comm.recv(0, tag).eq(tag).all()
    print("ALL RECEIVED")
"""
    result = job(body, n=2, transport=transport)
    assert result.returncode == 0, result.output
    assert "ALL RECEIVED" in result.stdout


def test_a_rank_that_leaves_early_does_not_disturb_ranks_that_do_not_need_it() -> None:
    body = """
if comm.rank != 0:
    time.sleep(3)
    other = 3 - comm.rank
    comm.send(x, other)
    comm.recv(other)
    print("WENT ON")
"""
    for transport in ("mpi", "gloo"):
        result = job(body, n=3, transport=transport)
        assert result.returncode == 0, result.output
        assert result.stdout.count("WENT ON") == 2


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_rank_0_may_end_at_once_though_its_control_server_is_slow(transport: str) -> None:
    script = """
import time, torchmn
from torchmn.communicators.watchdog.control_channel import ControlClient, ControlServer
handshake, connect = ControlServer._handshake, ControlClient.__init__
def slow(self, connection):
    time.sleep(1)
    handshake(self, connection)
def rank_0_last(self, rank, *where, **limit):
    time.sleep(1 if rank == 0 else 0)
    connect(self, rank, *where, **limit)
ControlServer._handshake, ControlClient.__init__ = slow, rank_0_last
comm = torchmn.create_communicator()
print("rank", comm.rank, "was here")
"""
    result = run_job(script, 3, transport)
    assert result.returncode == 0, result.output
    assert result.stdout.count("was here") == 3


def test_a_rank_that_makes_fewer_steps_than_the_others_does_not_leave_them_waiting() -> None:
    body = """
model = torch.nn.Linear(4, 2)
optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
for _ in range(3 - comm.rank):
    model(x).sum().backward()
    optimizer.step()
"""
    result = job(body, n=2)
    assert result.returncode != 0
    assert "rank 1 left (its script ended or called sys.exit); rank 0 waits for it in optimizer step" in result.output
    assert "equally often: torchmn.scatter_dataset gives every rank equally many items" in result.output


def test_a_job_that_ends_by_an_exception_leaves_no_shared_memory() -> None:
    """MPICH would leave a file of 2 MB, whose name it removes in MPI_Finalize only."""
    body = """
from pathlib import Path
lines = Path("/proc/self/maps").read_text().splitlines()
for name in {line.split("/dev/shm/")[1] for line in lines if "/dev/shm/mpich_" in line}:
    print("MAPPED", name, flush=True)
comm.barrier()
if comm.rank == 1: raise RuntimeError("the reason")
comm.barrier()
"""
    result = job(body)
    assert "the reason" in result.output
    files = re.findall(r"MAPPED (mpich_\w+)", result.stdout)
    assert files, result.output
    assert not any((Path("/dev/shm") / file).exists() for file in files)


def test_a_rank_that_is_killed_while_ranks_map_their_memory_leaves_no_file() -> None:
    script = """
import os, signal, sys
from torchmn.communicators.fastpath import shared_memory
exchange = shared_memory.allgather_plain
def killed(comm, path):
    with open(sys.argv[1], "a") as file: file.write(path + chr(10))
    comm.Barrier()
    if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    return exchange(comm, path)
shared_memory.allgather_plain = killed
import torchmn
torchmn.create_communicator()
"""
    with tempfile.NamedTemporaryFile("r") as created:
        result = run_job(script, 2, args=[created.name], env={"TORCHMN_TEST_WARM_START": "0"})
        files = created.read().split()
    assert len(files) == 2, result.output
    # An observer that starts late finds that the rank has ended, and not how.
    assert re.search(r"torchmn: rank 1 of 2 (\(process \d+ on \S+\) was ended by SIGKILL|has ended)", result.output)
    assert result.output.count("torchmn: rank ") == 1
    assert not any(Path(file).exists() for file in files)
