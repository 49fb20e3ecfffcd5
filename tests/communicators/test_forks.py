"""A process that a rank forks is no rank: it can neither communicate nor end the job."""

import os
from collections.abc import Callable

import pytest
import torch

import torchmn
from tests._worlds import ranks, run_job


def status_of_child(does: Callable[[], object]) -> int:
    """7 if a forked process was refused what it `does`, 0 if it did it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        does()
        status = 0
    except torchmn.TorchMNError as error:
        status = 7 if "forked from this rank" in str(error) else 2
    finally:
        os._exit(status)


@ranks(2, on=("mpi", "gloo"))
def test_a_forked_process_cannot_communicate_and_the_rank_can(comm):
    group, x = comm.split(0), torch.ones(3)
    peer = 1 - comm.rank
    for each in (comm, group):
        for does in (each.barrier, lambda each=each: each.send(x, peer), lambda each=each: each.allreduce(x)):
            assert status_of_child(does) == 7
        assert each.allreduce(x).tolist() == [2.0, 2.0, 2.0]
        each.send(x, peer)
        assert each.recv(peer).equal(x)


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_the_end_of_a_forked_process_is_not_that_of_its_rank(transport):
    result = run_job(
        """
import os, sys
import torch, torchmn
comm = torchmn.create_communicator()
for number in range(2):
    child = os.fork() if comm.rank == 1 else None
    if child == 0:
        if number:
            raise RuntimeError("of the child")
        sys.exit(3)
    if child:
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert comm.allreduce(torch.ones(2)).tolist() == [2.0, 2.0]
print("done")
""",
        2,
        transport,
        env={"TORCHMN_TIMEOUT": "20"},
    )
    assert result.returncode == 0, result.output
    assert result.output.count("done") == 2
    assert "child 3" in result.output and "child 1" in result.output
    assert "the job is ended" not in result.output
