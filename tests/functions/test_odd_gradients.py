"""Gradients that come back through send and recv and are not ordinary tensors: sparse, or without memory."""

import pytest
import torch

import torchmn
from tests._worlds import ranks
from torchmn import functions as F


@ranks(2)
def test_a_sparse_gradient_comes_back_dense(comm):
    if comm.rank == 0:
        table = torch.ones(4, 2, requires_grad=True)
        F.send(table, comm, 1).backward()
        assert table.grad is not None and table.grad.tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    else:
        table = F.recv(comm, 0)
        torch.nn.functional.embedding(torch.tensor([1, 3, 1]), table, sparse=True).sum().backward()


@ranks(2)
def test_gradients_of_zeros_without_memory_come_back_as_zeros(comm):
    if comm.rank == 0:
        x = torch.ones(3, requires_grad=True)
        F.send(x, comm, 1).backward()
        assert x.grad is not None and x.grad.add(1).tolist() == [1.0, 1.0, 1.0]
    else:
        F.recv(comm, 0).backward(torch._efficientzerotensor(3))


@ranks(2)
def test_a_gradient_that_cannot_be_sent_is_an_error_on_both_ranks(comm):
    if comm.rank == 0:
        with pytest.raises(torchmn.PeerError, match=r"rank 0 of 2: backward of send to rank 1: .*memory"):
            F.send(torch.ones(3, requires_grad=True), comm, 1).backward()
    else:
        gradient = torch.ones(3)
        gradient.untyped_storage().resize_(0)
        with pytest.raises(torchmn.ArgumentError, match=r"rank 1 of 2: the gradient for rank 0 .*memory"):
            F.recv(comm, 0).backward(gradient)
