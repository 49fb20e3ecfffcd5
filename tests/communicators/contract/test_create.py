"""create_communicator: names select the transport, and errors about wrong ones suggest the nearest."""

import pickle
from copy import copy, deepcopy

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks

NCCL_NAMES = ("nccl", "pure_nccl", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware")


def test_without_a_launcher_auto_is_a_world_of_one():
    for name in ("auto", "solo"):
        comm = torchmn.create_communicator(name)
        assert (comm.rank, comm.size) == (0, 1)
        assert comm.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]


@ranks(1, 2, 3, on="mpi")
@ranks(2, on="openmpi")
def test_under_mpiexec_auto_and_the_names_of_chainermn_are_mpi(comm):
    for name in ("auto", "mpi", "naive", "flat"):
        with torchmn.create_communicator(name) as world:
            assert (world.rank, world.size) == (comm.rank, comm.size)
            assert type(world) is type(comm)
            assert world.allgather_obj(name) == [name] * comm.size


@ranks(1, 2, on="gloo")
def test_under_torchrun_auto_is_gloo_where_there_is_no_gpu(comm):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: auto is nccl")
    for name in ("auto", "gloo"):
        with torchmn.create_communicator(name) as world:
            assert (world.rank, world.size) == (comm.rank, comm.size)
            assert type(world) is type(comm)
            assert world.allgather_obj(name) == [name] * comm.size


@ranks(1, 2, 3, on="threads")
def test_a_program_that_creates_its_communicator_itself_runs_in_run_threads(comm):
    for name in ("auto", "threads"):
        with torchmn.create_communicator(name, grad_dtype=torch.bfloat16, timeout=7) as world:
            assert (world.rank, world.size) == (comm.rank, comm.size)
            assert world.allgather_obj(comm.rank) == list(range(comm.size))
            assert (world.settings.grad_dtype, world.settings.timeout) == (torch.bfloat16, 7)
    assert comm.settings.grad_dtype is None
    assert comm.allgather_obj(comm.rank) == list(range(comm.size))  # it is another one, and still open
    assert torchmn.create_communicator("solo").size == 1


@ranks(2, 3, on="mpi")
def test_an_mpi_communicator_can_be_given(comm):
    from mpi4py import MPI

    alone = torchmn.create_communicator("mpi", mpi_comm=MPI.COMM_SELF)
    assert (alone.rank, alone.size) == (0, 1)
    backwards = torchmn.create_communicator("mpi", mpi_comm=MPI.COMM_WORLD.Split(0, -comm.rank))
    assert backwards.allgather_obj(comm.rank) == list(reversed(range(comm.size)))
    assert backwards.rank == comm.size - 1 - comm.rank


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(torchmn.ArgumentError, match="naive"):
        torchmn.create_communicator("naiv")
    with pytest.raises(torchmn.ArgumentError, match=r"mpi.*solo"):
        torchmn.create_communicator("something else")
    for wrong in (None, 3, ["mpi"]):
        with pytest.raises(torchmn.ArgumentError):
            torchmn.create_communicator(wrong)


def test_an_unknown_keyword_is_refused_with_the_nearest():
    with pytest.raises(torchmn.TorchMNError, match="timeout") as caught:
        torchmn.create_communicator("solo", timeuot=3)
    assert isinstance(caught.value, TypeError)
    with pytest.raises(torchmn.TorchMNError, match="grad_dtype"):
        torchmn.create_communicator("solo", gradient_dtype=torch.float16)


@pytest.mark.parametrize("name", NCCL_NAMES)
def test_the_error_of_nccl_without_a_gpu_names_what_works(name):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(torchmn.TorchMNError, match=r"GPU.*mpi"):
        torchmn.create_communicator(name)


def test_options_that_cannot_be_right_are_refused():
    for wrong in (0, -1, "5", True, float("nan")):
        with pytest.raises(torchmn.ArgumentError, match="timeout"):
            torchmn.create_communicator("solo", timeout=wrong)
    with pytest.raises(torchmn.ArgumentError, match="run_threads"):
        torchmn.create_communicator("threads")
    with pytest.raises(torchmn.ArgumentError, match="mpi_comm"):
        torchmn.create_communicator("solo", mpi_comm=object())
    with pytest.raises(torchmn.ArgumentError, match="device"):
        torchmn.create_communicator("solo", device="nowhere")


def test_run_threads_returns_results_in_rank_order_and_raises_what_a_rank_raised():
    assert torchmn.run_threads(lambda comm: (comm.rank, comm.size), 3) == [(0, 3), (1, 3), (2, 3)]

    def one_fails(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("on one rank")
        comm.recv(1)

    with pytest.raises(ZeroDivisionError, match="on one rank"):
        torchmn.run_threads(one_fails, 4)
    for size in (0, -1, 1.5, "2"):
        with pytest.raises(torchmn.ArgumentError):
            torchmn.run_threads(one_fails, size)


@ranks(2, on="threads")
@ranks(2, on="mpi")
@ranks(2, on="gloo")
def test_a_copy_of_what_holds_a_communicator_communicates_with_the_same_ranks_and_none_is_pickled(comm):
    holder = nn.Linear(1, 1)
    holder.comm = comm  # type: ignore[assignment]  as layers of users do
    assert deepcopy(holder).comm is comm
    for pickled in (pickle.dumps, copy):
        with pytest.raises(torchmn.ArgumentError, match=rf"rank {comm.rank} of 2>.*cannot be pickled.*state_dict"):
            pickled(comm)
