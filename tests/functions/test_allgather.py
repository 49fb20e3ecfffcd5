"""allgather: the tensors of all ranks on every rank; the gradient is the sum over ranks."""

import pytest
import torch

import torchmn
from tests._worlds import ranks
from tests.functions.serial import check_adjoint, check_against_serial, leaf
from torchmn import functions as F


@ranks(1, 2, 3, 4)
def test_its_adjoint_is_exact(comm):
    check_adjoint(comm, lambda x: F.allgather(comm, x), [leaf(3, 4, seed=comm.rank)])


@ranks(1, 2, 3, 4, 6, on="threads")
@ranks(2, on=["mpi", "gloo"])
@pytest.mark.parametrize("ragged", [False, True])
def test_values_gradients_and_their_gradients_equal_those_of_one_rank(comm, ragged):
    check_against_serial(
        comm,
        lambda x: F.allgather(comm, x),
        lambda inputs_by_rank: [[x for (x,) in inputs_by_rank]] * comm.size,
        lambda rank: [leaf(rank if ragged else 2, 3, seed=rank)],  # rank 0's is empty
    )


@ranks(3)
def test_parts_that_the_loss_does_not_use_get_zeros(comm):
    x = torch.ones(2, requires_grad=True)
    parts = F.allgather(comm, x)
    (parts[0] * (comm.rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 6.0 if comm.rank == 0 else 0.0))


@ranks(2, on="threads")
def test_one_part_may_be_changed_in_place_without_touching_the_others(comm):
    x = torch.tensor([1.0 + comm.rank], requires_grad=True)
    first, second = F.allgather(comm, x)
    squared = second.square()
    first.mul_(10)
    (first + squared).sum().backward()
    assert second.item() == 2.0
    assert x.grad.item() == (20.0 if comm.rank == 0 else 2 * 4.0)


@ranks(2, on="threads")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_keep_their_dtype(comm, dtype):
    x = torch.full((3,), 1.5, dtype=dtype, requires_grad=True)
    parts = F.allgather(comm, x)
    sum(parts).sum().backward()
    assert parts[1].dtype == x.grad.dtype == dtype and x.grad.tolist() == [2.0] * 3


@ranks(2, on="threads")
def test_integers_and_bools_have_no_gradient(comm):
    for x in (torch.arange(comm.rank), torch.tensor([True])):
        parts = F.allgather(comm, x)
        assert torch.equal(parts[comm.rank], x) and not parts[0].requires_grad


@ranks(2)
def test_what_needs_a_gradient_on_one_rank_only_gets_it(comm):
    x = torch.ones(2, requires_grad=comm.rank == 0)
    (sum(F.allgather(comm, x)) * (comm.rank + 1)).sum().backward()
    assert comm.rank or torch.equal(x.grad, torch.full((2,), 3.0))


@ranks(2, on="threads")
def test_dtypes_that_differ_are_refused_on_all_ranks(comm):
    with pytest.raises(torchmn.MismatchError, match="dtype"):
        F.allgather(comm, torch.ones(1, dtype=torch.float32 if comm.rank else torch.float64, requires_grad=True))
