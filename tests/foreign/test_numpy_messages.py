"""NumPy arrays in place of tensors: values and types are those of ChainerMN, errors those of tensors."""

import numpy as np
import pytest
import torch

import torchmn
from tests._worlds import ranks
from torchmn import functions as F

DTYPES = (np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_, np.complex64)


def assert_array(got, expected) -> None:
    assert isinstance(got, np.ndarray)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@ranks(1, 2, 3)
def test_collective_operations_return_arrays(comm):
    size, rank = comm.size, comm.rank
    for dtype in (np.float32, np.int64):
        for shape in ((), (3,), (2, 0), (2, 3)):
            parts = [np.full(shape, each + 1, dtype) for each in range(size)]
            x = parts[rank]
            assert_array(comm.allreduce(x), np.full(shape, sum(range(size + 1)), dtype))
            for got, expected in zip(comm.allgather(x), parts, strict=True):
                assert_array(got, expected)
            root = size - 1
            gathered = comm.gather(x, root)
            assert (gathered is None) == (rank != root)
            for got, expected in zip(gathered or (), parts, strict=False):
                assert_array(got, expected)
            assert_array(comm.bcast(x if rank == root else None, root), parts[root])
            assert_array(comm.bcast(x, root=root), parts[root])
            assert_array(comm.scatter(parts if rank == root else None, root), parts[rank])
            for got in comm.alltoall([x] * size):
                assert isinstance(got, np.ndarray)
            assert_array(comm.reduce_scatter(parts), parts[rank] * dtype(size))
    table = np.arange(2.0 * size).reshape(size, 2)
    assert_array(comm.scatter(table if rank == 0 else None), table[rank])
    assert_array(np.stack(comm.alltoall(table)), np.stack([table[rank]] * size))


@ranks(2)
def test_messages_arrive_as_arrays(comm):
    other = 1 - comm.rank
    for dtype in DTYPES:
        x = np.arange(6).reshape(2, 3).astype(dtype)
        comm.send(x, other, 0)
        assert_array(comm.recv(other, 0), x)
        comm.send((x, x[:, ::-1]), other, tag=1)
        whole, reversed_columns = comm.recv(other, tag=1)
        assert_array(whole, x)
        assert_array(reversed_columns, x[:, ::-1])
    comm.send([x], other)
    (only,) = comm.recv(other)
    assert_array(only, x)
    large = np.arange(300_000.0)
    comm.send(large, other)
    assert_array(comm.recv(other), large)


@ranks(2, on="threads")
def test_the_root_keeps_its_array_and_in_place_changes_it(comm):
    x = np.arange(3.0)
    assert (comm.bcast(x) is x) == (comm.rank == 0)
    assert (comm.bcast(root=1, data=x) is x) == (comm.bcast(root=1, x=x) is x) == (comm.rank == 1)
    columns = np.arange(6.0).reshape(3, 2).T
    assert comm.allreduce(columns, in_place=True) is columns
    np.testing.assert_array_equal(columns, 2 * np.arange(6.0).reshape(3, 2).T)
    constant = np.arange(3.0)
    constant.flags.writeable = False
    np.testing.assert_array_equal(comm.allreduce(constant), 2 * constant)


@ranks(2, on="threads")
def test_a_rank_may_pass_a_tensor_and_another_an_array(comm):
    x = np.ones(2) if comm.rank == 0 else torch.ones(2, dtype=torch.float64)
    total = comm.allreduce(x)
    assert type(total) is (np.ndarray if comm.rank == 0 else torch.Tensor)
    assert total.tolist() == [2, 2]


@ranks(2, on="threads")
def test_functions_return_tensors(comm):
    x = np.arange(2.0)
    other = 1 - comm.rank
    total = F.allreduce(comm, x)
    assert isinstance(total, torch.Tensor) and total.tolist() == [0, 2]
    mixed = F.allreduce(comm, x if comm.rank == 0 else torch.ones(2, dtype=torch.float64, requires_grad=True))
    mixed.sum().backward()
    assert [part.tolist() for part in F.allgather(comm, x)] == [[0, 1], [0, 1]]
    assert F.bcast(comm, x if comm.rank == 1 else None, 1).tolist() == [0, 1]
    assert F.scatter(comm, [x, x + 1] if comm.rank == 0 else None).tolist() == [comm.rank, comm.rank + 1]
    F.send(x, comm, other)
    received = F.recv(comm, other)
    assert isinstance(received, torch.Tensor) and received.tolist() == [0, 1]
    comm.send(x, other)
    assert F.recv(comm, other).tolist() == [0, 1]
    if comm.rank == 0:
        phi = F.send(x, comm, 1)
        (joined,) = F.pseudo_connect(phi, x)
        joined.sum().backward()
    else:
        F.recv(comm, 0).sum().backward()
    assert F.allreduce(comm, torch.ones(())).item() == 2  # calls still have the same numbers on all ranks


@ranks(2, on="threads")
def test_an_array_that_cannot_be_sent_raises_on_every_rank(comm):
    wrong = np.array(["text"]) if comm.rank == 1 else np.ones(1)
    with pytest.raises(
        torchmn.ArgumentError, match="rank 1 of 2: allreduce: expected a tensor, got a NumPy array of <U4"
    ):
        comm.allreduce(wrong)
    with pytest.raises(torchmn.MismatchError, match="shape"):
        comm.allreduce(np.ones(comm.rank + 1))
    with pytest.raises(torchmn.ArgumentError, match="expected 2 tensors, one per rank, got 3"):
        comm.alltoall(np.ones((3, 2)))
    if comm.rank == 0:
        with pytest.raises(torchmn.ArgumentError, match=r"send to rank 1.* NumPy array of object"):
            comm.send(np.array([None]), 1)
    else:
        with pytest.raises(torchmn.PeerError, match="NumPy array of object"):
            comm.recv(0)
