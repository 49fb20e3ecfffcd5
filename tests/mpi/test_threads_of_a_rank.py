"""Threads of a rank that use its communicator out of turn, or die: fresh jobs of processes."""

from __future__ import annotations

import pytest

from tests._worlds.jobs import JobResult, run_job

START = """
import threading
from concurrent.futures import ThreadPoolExecutor
import torch, torchmn
comm = torchmn.create_communicator()

def spawn(work):
    thread = threading.Thread(target=work, name="second")
    thread.start()
    return thread
"""

PROCESSES = ("mpi", "openmpi", "gloo")


def job(body: str, transport: str = "mpi", n: int = 2, **env: str) -> JobResult:
    result = run_job(START + body, n, transport, env=env, timeout=90.0)
    assert not result.timed_out, result.output
    assert not result.survivors, f"left behind: {result.survivors}"
    return result


@pytest.mark.parametrize("transport", PROCESSES)
def test_two_threads_that_sum_on_one_communicator_end_the_job_and_print_no_number(transport: str) -> None:
    body = """
def sums(start):
    for n in range(start, start + 300):
        total = comm.allreduce(torch.full((50,), float(n)))
        assert total.eq(comm.size * n).all(), "wrong"
comm.barrier()
second = spawn(lambda: sums(1000))
sums(0)
second.join()
print("the end")
"""
    result = job(body, transport)
    assert result.returncode != 0
    assert "ThreadError: rank " in result.output
    assert "in thread 'second', at " in result.output
    assert "own = comm.split(0, comm.rank)" in result.output
    assert "wrong" not in result.output
    assert "the end" not in result.output


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_rank_that_waits_in_a_broken_communicator_is_freed_though_the_error_was_kept(transport: str) -> None:
    """The error is stored in a Future whose result is never read, and rank 0 waits for a message that does not come."""
    body = """
comm.barrier()
if comm.rank == 0:
    future = ThreadPoolExecutor(1).submit(comm.barrier)
    comm.recv(1)
comm.barrier()
"""
    result = job(body, transport, TORCHMN_TIMEOUT="80")
    assert result.returncode not in (0, 124), result.output
    assert "rank 0 of 2: barrier of communicator 'world' in thread 'ThreadPool" in result.output
    assert "rank 1 waits in barrier of that communicator; the job is ended" in result.output
    assert "has waited for" not in result.output


def test_the_thread_that_creates_a_communicator_need_not_be_the_one_that_uses_it() -> None:
    body = """
def use():
    assert comm.allreduce(torch.ones(1)).item() == 2.0
spawn(use).join()
comm.barrier()
"""
    result = job(body)
    assert result.returncode == 0, result.output
    assert not result.output


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_thread_that_has_communicated_and_raises_ends_the_job(transport: str) -> None:
    body = """
def talk():
    comm.send(torch.ones(1), 1)
    raise RuntimeError("the reason")
if comm.rank == 0:
    spawn(talk).join()
else:
    comm.recv(0)
comm.recv(1 - comm.rank, tag=5)
"""
    result = job(body, transport, TORCHMN_TIMEOUT="80")
    assert result.returncode not in (0, 124), result.output
    assert "rank 0 of 2 raised in thread 'second'; the job is ended" in result.output
    assert result.output.count("RuntimeError: the reason") == 1


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_a_thread_that_has_not_communicated_and_raises_is_reported_and_the_job_goes_on(transport: str) -> None:
    body = """
def count():
    raise RuntimeError("the reason")
if comm.rank == 1:
    spawn(count).join()
    spawn(lambda: sys.exit(3)).join()  # ends the thread, without a word
assert comm.allreduce(torch.ones(1)).item() == 2.0
"""
    result = job("import sys\n" + body, transport)
    assert result.returncode == 0, result.output
    assert "rank 1 of 2 raised in thread 'second', which has not communicated; the job continues:" in result.output
    assert result.output.count("RuntimeError: the reason") == 1
    assert "SystemExit" not in result.output


def test_a_hook_of_the_user_is_called_and_reports_alone() -> None:
    body = """
def count():
    raise RuntimeError("the reason")
if comm.rank == 1:
    spawn(count).join()
comm.barrier()
"""
    hook = "import threading\nthreading.excepthook = lambda args: print('my hook:', args.exc_value)\n"
    result = run_job(hook + START + body, 2, "mpi")
    assert result.returncode == 0, result.output
    assert "my hook: the reason" in result.output
    assert "Traceback" not in result.output


def test_without_the_abort_hook_a_thread_that_raises_is_left_to_python() -> None:
    body = """
def talk():
    comm.send(torch.ones(1), 1)
    raise RuntimeError("the reason")
if comm.rank == 0:
    spawn(talk).join()
else:
    comm.recv(0)
comm.barrier()
"""
    result = job(body, TORCHMN_ABORT="0")
    assert result.returncode == 0, result.output
    assert "Exception in thread second" in result.output
    assert "the job is ended" not in result.output
