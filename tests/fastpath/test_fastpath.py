"""The fast paths: for all ranks or for none, and the core is complete without them."""

from __future__ import annotations

import pytest
import torch

from tests._worlds.jobs import run_job, without_package
from tests._worlds.marks import ranks
from tests.functions.test_message_count import CountedMPI

SET_ON_ONE_RANK = """
import os
from mpi4py import MPI
os.environ["{variable}"] = "0" if MPI.COMM_WORLD.rank == 1 else "1"
import torchmn
try:
    torchmn.create_communicator()
except torchmn.MismatchError as error:
    print(error, flush=True)
"""

ON_ONE_RANK_OF_GLOO = """
import os
os.environ["TORCHMN_CHECKS"] = "0" if os.environ["RANK"] == "1" else "1"
import torchmn
try:
    torchmn.create_communicator()
except torchmn.MismatchError as error:
    print(error, flush=True)
"""

WITHOUT_THE_PACKAGE = """
import torch, torchmn
comm = torchmn.create_communicator()
for count in (3, 100_000, 2_000_000):
    assert comm.allreduce(torch.ones(count)).eq(comm.size).all()
    if comm.rank == 0:
        comm.send(torch.full((count,), 7.0), 1)
    else:
        assert comm.recv(0).eq(7).all()
assert type(comm.transport).__name__ == "MPITransport"
print("works", flush=True)
"""


@pytest.mark.parametrize("variable", ["TORCHMN_FASTPATH", "TORCHMN_CHECKS", "TORCHMN_FUSION"])
def test_a_switch_that_is_set_on_one_rank_only_is_an_error_on_all(variable: str) -> None:
    result = run_job(SET_ON_ONE_RANK.format(variable=variable), 2, "mpi")
    assert result.returncode == 0, result.output
    for rank in (0, 1):
        assert (
            f"rank {rank} of 2: create_communicator: {variable}=0 on rank 1 only: set it on every rank" in result.output
        )


def test_checks_that_are_off_on_one_rank_of_gloo_are_an_error_on_all() -> None:
    result = run_job(ON_ONE_RANK_OF_GLOO, 2, "gloo")
    for rank in (0, 1):
        assert f"rank {rank} of 2: create_communicator: TORCHMN_CHECKS=0 on rank 1 only" in result.output


def test_communication_works_with_the_package_taken_away() -> None:
    result = run_job(without_package("torchmn.communicators.fastpath") + WITHOUT_THE_PACKAGE, 2, "mpi")
    assert result.returncode == 0, result.output
    assert result.output.count("works") == 2


@ranks(2, on="mpi")
def test_a_small_sum_is_one_message_of_each_rank(comm) -> None:
    comm.barrier()
    comparison, mpi = comm.transport._comparison, comm.transport.collective
    comparison._comm = comm.transport.collective = CountedMPI(mpi)
    try:
        assert comm.allreduce(torch.ones(256)).tolist() == [2.0] * 256
        assert len(comparison._comm.sent) == 1
    finally:
        comparison._comm = comm.transport.collective = mpi
