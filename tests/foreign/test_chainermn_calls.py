"""Calls with ChainerMN's names and positions of arguments, and attributes of its communicators."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchmn
from tests._worlds import ranks, run_job
from torchmn import functions as F


def trained(comm, *args, **kwargs) -> float:
    """The parameter after three steps of an optimizer that was created with these arguments."""
    weight = nn.Parameter(torch.ones(()))
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD([weight], lr=0.1), *args, **kwargs)
    for step in range(3):
        optimizer.zero_grad()
        (weight * (comm.rank + step)).backward()
        optimizer.step()
    return weight.item()


@ranks(2, on="threads")
def test_the_optimizer_takes_chainermn_s_positions_and_names(comm):
    plain = trained(comm, comm)
    assert trained(comm, comm, False, True) == plain
    assert trained(comm, communicator=comm, zero_fill=True) == plain
    assert trained(comm, comm, True) == trained(comm, comm, double_buffering=True) != plain
    with pytest.raises(TypeError, match="positional"):
        trained(comm, comm, False, True, None)


@ranks(2, on="threads")
def test_other_functions_take_chainermn_s_names(comm):
    data = list(range(5))
    part = torchmn.scatter_dataset(data, comm, 0, True, 3, max_buf_len=1 << 20)
    assert list(part) == list(torchmn.scatter_dataset(data, comm, shuffle=True, seed=3))
    assert torchmn.scatter_index(n_total_samples=5, comm=comm) == torchmn.scatter_index(5, comm)
    assert comm.bcast_obj([comm.rank], max_buf_len=1 << 20, root=1) == comm.bcast_obj([comm.rank], 1 << 20, 1) == [1]
    assert comm.allreduce(data=torch.ones(1)).item() == 2
    batch_norm = torchmn.create_mnbn_model(link=nn.BatchNorm1d(2), comm=comm, communication_backend="mpi")
    assert batch_norm.comm is comm
    evaluate = torchmn.create_multi_node_evaluator(lambda: {"loss": (float(comm.rank), 1)}, communicator=comm)
    assert evaluate() == {"loss": 0.5}
    chain = torchmn.MultiNodeChainList(comm=comm)
    chain.add_link(link=nn.Identity(), rank_in=None, rank_out=None)
    assert chain(torch.ones(1)).item() == 1
    iterator = torchmn.iterators.create_multi_node_iterator(
        actual_iterator=DataLoader(data), communicator=comm, rank_master=1
    )
    assert len(list(iterator)) == 5


@ranks(2, on="threads")
def test_messages_take_the_communicator_by_its_name(comm):
    x = torch.arange(3.0, requires_grad=True)
    if comm.rank == 0:
        F.send(x, communicator=comm, rank=1).backward()
        assert x.grad.tolist() == [2, 2, 2]
    else:
        (2 * F.recv(communicator=comm, rank=0)).sum().backward()


@ranks(2, on="threads")
def test_the_device_of_early_versions_has_no_effect(comm):
    x = torch.arange(2.0, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if comm.rank == 0:
            F.send(x, comm, 1).backward()
            assert x.grad.tolist() == [3, 3]
        else:
            (3 * F.recv(comm, 0, device=-1)).sum().backward()
        own = [torch.full((2,), comm.rank + 1.0)] * 2
        assert F.bcast(comm, own[0], 1, -1).tolist() == [2, 2]
        assert F.scatter(comm, own, 0, device=-1).tolist() == [1, 1]
        assert [y[0].item() for y in F.allgather(comm, own[0], -1)] == [1, 2]
        assert [y[0].item() for y in F.alltoall(comm, own, device=-1)] == [1, 2]
        gathered = F.gather(comm, own[0], 0, -1)
        assert comm.rank == 1 or [y[0].item() for y in gathered] == [1, 2]
    with pytest.raises(TypeError, match="unexpected keyword argument 'devise'"):
        F.recv(comm, 0, devise=-1)


@ranks(2, on="threads")
def test_a_generic_evaluator_takes_a_trainer(comm):
    evaluator = torchmn.extensions.GenericMultiNodeEvaluator(comm, [(comm.rank, 1), (comm.rank, 2)], lambda a, b: a + b)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert evaluator(None) == ([1, 2, 2, 3] if comm.rank == 0 else None)


@ranks(2, on="threads")
def test_a_checkpointer_that_gets_a_trainer_names_what_to_pass(comm, tmp_path):
    checkpointer = torchmn.create_multi_node_checkpointer("run", comm, tmp_path)
    with pytest.raises(torchmn.ArgumentError, match=r"save\(step, model=model, optimizer=optimizer\), got Linear, int"):
        checkpointer.save(nn.Linear(1, 1), 3)
    with pytest.raises(
        torchmn.ArgumentError, match=r"as in maybe_load\(model=model, optimizer=optimizer\), got Linear"
    ):
        checkpointer.maybe_load(nn.Linear(1, 1))


@ranks(2, on="threads")
def test_a_recurrent_network_that_gets_a_list_of_sequences_names_what_to_pass(comm):
    peer = {"rank_out": 1} if comm.rank == 0 else {"rank_in": 0}
    rnn = torchmn.links.create_multi_node_n_step_rnn(nn.LSTM(2, 2), comm, **peer)
    with pytest.raises(
        torchmn.ArgumentError, match=r"got a list of 2.*pack_sequence\(sequences, enforce_sorted=False\)"
    ):
        rnn([torch.ones(3, 2), torch.ones(2, 2)])


def test_what_has_no_effect_is_said_once(tmp_path):
    script = """
import torchmn
for _ in range(2):
    comm = torchmn.create_communicator("naive", batched_copy=True)
    torchmn.scatter_dataset([1], comm, max_buf_len=5)
    torchmn.extensions.MultiNodeEarlyStoppingTrigger(comm, verbose=True, suffix="_mean")
    torchmn.links.MultiNodeBatchNormalization(2, comm, 0.9, 2e-5, None, True, True, None, None, "nccl")
"""
    job = run_job(script, 1, "solo")
    assert job.returncode == 0, job.output
    assert job.stderr.count("create_communicator: batched_copy is accepted") == 1, job.output
    assert job.stderr.count("scatter_dataset: max_buf_len is accepted") == 1
    assert job.stderr.count("MultiNodeEarlyStoppingTrigger: verbose is accepted") == 1
    assert job.stderr.count("MultiNodeEarlyStoppingTrigger: suffix is accepted") == 1
    assert job.stderr.count("MultiNodeBatchNormalization: communication_backend is accepted") == 1
    assert "script" in job.stderr or ".py:4: UserWarning" in job.stderr


def test_create_communicator_takes_chainermn_s_keywords():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comm = torchmn.create_communicator(
            communicator_name="naive", allreduce_grad_dtype=np.float16, batched_copy=True
        )
    assert comm.settings.grad_dtype == torch.float16
    with pytest.raises(torchmn.ArgumentError, match=r"unknown keyword 'bached_copy'"):
        torchmn.create_communicator("naive", bached_copy=True)
    with pytest.raises(torchmn.ArgumentError, match="expected a dtype of torch or NumPy, got 'hlf'"):
        torchmn.create_communicator("naive", allreduce_grad_dtype="hlf")


@ranks(2, on="threads")
def test_attributes_of_chainermn_s_communicators(comm):
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(comm.rank)
    comm.broadcast_data(model)
    assert model.weight.item() == 0
    model.weight.grad = torch.full((1, 1), float(comm.rank))
    comm.allreduce_grad(model)
    assert model.weight.grad.item() == 0.5
    comm.set_config("allreduce_grad_dtype", np.float16)
    comm.set_config("batched_copy")
    assert comm.get_config("allreduce_grad_dtype") == comm.settings.grad_dtype == torch.float16
    assert comm.get_config() == {"allreduce_grad_dtype": torch.float16, "batched_copy": True}
    assert comm.split(0, 0).get_config("allreduce_grad_dtype") == torch.float16
    with pytest.raises(ValueError, match="set_config: expected one of allreduce_grad_dtype, batched_copy, got 'x'"):
        comm.set_config("x")
    with pytest.raises(KeyError):
        comm.get_config("x")
    assert not comm.within_config_scope and comm.batched_copy


def test_the_error_for_other_names_is_python_s():
    comm = torchmn.create_communicator("solo")
    with pytest.raises(AttributeError, match=r"no attribute 'config_scope'; instead: .*grad_dtype="):
        comm.config_scope  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'mpi_comm'; instead: .*barrier") as caught:
        comm.mpi_comm  # noqa: B018
    assert not hasattr(comm, "mpi_comm")
    assert caught.value.name == "mpi_comm"
    with pytest.raises(AttributeError, match=r"no attribute \"no_name_of_anybody's\"$"):
        getattr(comm, "no_name_of_anybody's")
    with pytest.raises(TypeError, match="unexpected keyword argument 'roots'"):
        comm.bcast_obj(1, roots=0)
    with pytest.raises(TypeError, match="takes from 3 to 4"):
        F.send(torch.ones(1), comm, 0, 0, 0)


@ranks(3, on="mpi")
def test_mpi4py_s_communicators_are_communicators(comm):
    from mpi4py import MPI

    assert comm.mpi_comm.allreduce(comm.rank) == 3
    odd = comm.split(comm.rank % 2, comm.rank)
    assert odd.mpi_comm.Get_size() == odd.size
    assert odd.mpi_comm.allgather(comm.rank) == [rank for rank in range(3) if rank % 2 == comm.rank % 2]
    part = torchmn.scatter_dataset(list(range(9)), MPI.COMM_WORLD)
    assert list(part) == list(range(3 * comm.rank, 3 * comm.rank + 3))
    assert torchmn.scatter_index(9, comm.mpi_comm) == (3 * comm.rank, 3 * comm.rank + 3)
    assert trained(comm, MPI.COMM_WORLD) == pytest.approx(trained(comm, comm))
    assert F.allreduce(MPI.COMM_WORLD, torch.ones(())).item() == 3
    assert torchmn.MultiNodeChainList(comm.mpi_comm).comm.size == 3
    with pytest.raises(torchmn.ArgumentError, match="expected comm to be a communicator"):
        torchmn.MultiNodeChainList(MPI.COMM_NULL)


@ranks(2, on="mpi")
def test_recv_obj_fills_mpi4py_s_status(comm):
    from mpi4py import MPI

    status = MPI.Status()
    if comm.rank == 0:
        comm.send_obj("a", 1, tag=3)
        comm.send_obj("b", 1, tag=4)
        comm.send_obj("c", 1)
    else:
        assert comm.recv_obj(0, status=status, tag=3) == "a"
        assert (status.Get_source(), status.Get_tag()) == (0, 3)
        assert comm.recv_obj(0, status, 4) == "b"
        assert status.Get_tag() == 4
        assert comm.recv_obj(source=0, status=None) == "c"


@ranks(2, on="mpi")
def test_create_communicator_takes_mpi_comm_second(comm):
    with torchmn.create_communicator("naive", comm.mpi_comm) as second:
        assert second.size == 2 and second.allreduce(torch.ones(())).item() == 2
        assert second.mpi_comm is comm.mpi_comm
