"""Values whose shape or dtype differs from the previous one of the same rank and tag."""

from __future__ import annotations

import gc

import pytest
import torch

import torchmn
from tests._worlds import ranks
from tests.functions.second_derivative import assert_gradient_of_gradient
from torchmn import functions as F

BOTH = ["threads", "mpi"]
LENGTHS = [64, 1 << 15, 5 << 18]  # in one message, in a slot of shared memory, in a separate message
each_length = pytest.mark.parametrize("length", LENGTHS)


def value(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(dtype.is_floating_point)


def settle(comm, *lengths: int) -> None:
    """Send a few values of each length."""
    for length in lengths:
        for step in range(3):
            x = value(step, length)
            if comm.rank == 0:
                F.send(x, comm, 1).backward()
                assert torch.equal(x.grad, 3 * x.detach())
            else:
                received = F.recv(comm, 0)
                assert torch.equal(received, x)
                received.backward(3 * received.detach())


UNLIKE = {
    "another shape of the same size": lambda: value(7, 16, 16),
    "another length": lambda: value(7, 255),
    "a longer shape": lambda: value(7, 4, 4, 4, 4),
    "another dtype": lambda: value(7, 256, dtype=torch.float64),
    "a dtype of the same size": lambda: torch.arange(256, dtype=torch.int32),
    "no gradient wanted": lambda: value(7, 256).detach(),
    "nothing": lambda: value(7, 0),
    "a scalar": lambda: value(7),
    "not contiguous": lambda: value(7, 256, 2).detach()[:, 0].requires_grad_(),
    "1 MB": lambda: value(7, 1 << 18),
    "10 MB": lambda: value(7, 10 << 18),
}


@ranks(2, on=BOTH)
@pytest.mark.parametrize("unlike", UNLIKE)
def test_a_value_unlike_the_last_one_arrives_and_its_gradient_comes_back(comm, unlike) -> None:
    settle(comm, 256)
    x = UNLIKE[unlike]()
    if comm.rank == 0:
        F.send(x, comm, 1).backward()
        assert not x.requires_grad or torch.equal(x.grad, 5 * x.detach())
    else:
        received = F.recv(comm, 0)
        assert received.dtype == x.dtype and torch.equal(received, x)
        assert received.requires_grad == x.is_floating_point()  # backward may be called on any
        if received.requires_grad:
            received.backward(5 * received.detach())
    settle(comm, *LENGTHS)


@ranks(2, on=BOTH)
def test_a_tuple_an_object_and_an_error_after_a_tensor(comm) -> None:
    settle(comm, 256)
    parts = (value(1, 256), value(2, 3))
    if comm.rank == 0:
        F.send(parts, comm, 1).backward()
        assert all(torch.equal(part.grad, 2 * part.detach()) for part in parts)
        comm.send_obj("text", 1)
        with pytest.raises(torchmn.ArgumentError):
            F.send("text", comm, 1)
    else:
        received = F.recv(comm, 0)
        assert [torch.equal(x, part) for x, part in zip(received, parts, strict=True)] == [True, True]
        sum((part**2).sum() for part in received).backward()
        with pytest.raises(torchmn.TorchMNError, match="receive it with comm"):
            F.recv(comm, 0)
        with pytest.raises(torchmn.PeerError, match="expected a tensor, got 'text'"):
            F.recv(comm, 0)
    settle(comm, 256, 100)


@ranks(2, on=BOTH)
@each_length
def test_gradients_that_look_alike_find_their_edges_in_any_order(comm, length) -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        leaves = [value(step, length) for step in range(3)]
        if comm.rank == 0:
            delegates = [F.send(leaf, comm, 1) for leaf in leaves]
            for place in order:
                delegates[place].backward()
            for place, leaf in enumerate(leaves):
                assert torch.equal(leaf.grad, torch.full((length,), float(place)))
        else:
            received = [F.recv(comm, 0) for _ in leaves]
            for place in (0, 1, 2):
                assert torch.equal(received[place], leaves[place])
                received[place].backward(torch.full((length,), float(place)))


@ranks(2, on=BOTH)
@each_length
def test_what_was_received_may_be_changed_in_place_kept_and_thrown_away(comm, length) -> None:
    settle(comm, length)
    kept = []
    for step in range(5):
        x = value(step, length)
        if comm.rank == 0:
            F.send(x, comm, 1).backward()
            assert torch.equal(x.grad, torch.full((length,), 4.0))
            unused = value(step, length)
            F.send(unused, comm, 1).backward()
            assert unused.grad is None
        else:
            received = F.recv(comm, 0)
            kept.append(received.detach().clone())
            received.mul_(2)
            (2 * received).sum().backward()
            F.recv(comm, 0)
            gc.collect()
    assert all(torch.equal(each, value(step, length)) for step, each in enumerate(kept))
    comm.barrier()


@ranks(2, on=BOTH)
def test_a_delegate_behind_a_received_value_is_visited(comm) -> None:
    for step in range(4):
        x = value(step, 32)
        if comm.rank == 0:
            F.recv(comm, 1, delegate_variable=F.send(x, comm, 1)).sum().backward()
            assert torch.equal(x.grad, 2 * x.detach()), step
        else:
            F.send(F.recv(comm, 0) ** 2, comm, 0).backward()


@ranks(2, on=BOTH)
def test_a_received_value_can_be_differentiated_twice(comm) -> None:
    for step in range(4):
        assert_gradient_of_gradient(comm, value(step, 8))
