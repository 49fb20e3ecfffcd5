"""Communicators that are dropped give back what MPI has only a limited number of; messages in flight cost nothing."""

from __future__ import annotations

import sys

import pytest
import torch

from tests._worlds import ranks
from tests._worlds.jobs import run_job

# MPI has about 2,000 communicators. All but a few are in use, so that a test is short.
DROPPED = """
import torch, torchmn
comm = torchmn.create_communicator()
from mpi4py import MPI
free, used = 60, []
try:
    while True: used.append(MPI.COMM_SELF.Dup())
except MPI.Exception: pass
for each in used[:free]: each.Free()
del used[:free]
part = None
for turn in range(2 * free):
    part = comm.split(comm.rank % 2 if turn % 3 else 0, comm.rank)  # the last one is dropped here
    assert part.allreduce(torch.ones(2)).sum() == 2 * part.size
    if part.size > 1:
        part.send(torch.ones(2), 1 - part.rank)
        part.recv(1 - part.rank)
print("ALL WORK")
"""


@pytest.mark.parametrize("transport", ["mpi", "openmpi"])
def test_any_number_of_communicators_may_be_split_off_and_dropped(transport: str) -> None:
    result = run_job(DROPPED, 2, transport, env={"TORCHMN_TIMEOUT": "60"})
    assert result.returncode == 0, result.output
    assert result.stdout.count("ALL WORK") == 2


@ranks(2, on="mpi")
def test_a_communicator_that_one_rank_still_has_works_on(comm) -> None:
    kept = comm.split(0, comm.rank)
    mine = [kept] if comm.rank == 0 else []
    del kept
    for _ in range(3):
        comm.split(0, -comm.rank)
    assert [each.size for each in mine] == [2] * len(mine)
    if mine:
        mine[0].send(torch.ones(3), 1)  # rank 1 has dropped its communicator
    assert comm.allreduce(torch.ones(1)).item() == 2


@ranks(2, on="mpi")
def test_a_send_costs_the_same_however_many_messages_are_not_yet_received(comm) -> None:
    calls = 0

    def count(frame, event, function) -> None:
        nonlocal calls
        calls += event == "c_call"

    def calls_of_sends(number: int) -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            for _ in range(number):
                comm.send(torch.ones(4), 1)
        finally:
            sys.setprofile(None)
        return calls

    if comm.rank == 0:
        few = calls_of_sends(500)
        for _ in range(4000):
            comm.send(torch.ones(4), 1)
        many = calls_of_sends(4500)
        comm.send_obj(9000, 1, tag=1)
        assert many < 2 * 9 * few
    else:
        for _ in range(comm.recv_obj(0, tag=1)):
            comm.recv(0)
    comm.barrier()
