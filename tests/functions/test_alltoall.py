"""alltoall: a tensor from every rank to every rank; its gradient returns."""

import pytest
import torch

import torchmn
from tests._worlds import ranks
from tests.functions.serial import check_adjoint, check_against_serial, leaf
from torchmn import functions as F


def ragged(size):
    return lambda rank: [leaf(rank, place + 1, seed=17 * rank + place) for place in range(size)]


@ranks(1, 2, 3, 4)
def test_its_adjoint_is_exact(comm):
    xs = [leaf(3, place + 1, seed=17 * comm.rank + place) for place in range(comm.size)]
    check_adjoint(comm, lambda *xs: F.alltoall(comm, xs), xs)


@ranks(1, 2, 3, 4, on="threads")
@ranks(2, on=["mpi", "gloo"])
def test_values_gradients_and_their_gradients_equal_those_of_one_rank(comm):
    check_against_serial(
        comm,
        lambda *xs: F.alltoall(comm, xs),
        lambda inputs_by_rank: [[xs[place] for xs in inputs_by_rank] for place in range(comm.size)],
        ragged(comm.size),
    )


@ranks(2)
def test_results_that_the_loss_does_not_use_get_zeros(comm):
    xs = [leaf(2, seed=place) for place in range(2)]
    F.alltoall(comm, xs)[1].sum().backward()
    for x in xs:
        assert torch.equal(x.grad, torch.full((2,), float(comm.rank == 1), dtype=torch.float64))


@ranks(2, on="threads")
def test_one_tensor_with_a_row_per_rank_is_accepted(comm):
    x = leaf(2, 3, seed=comm.rank)
    (torch.stack(F.alltoall(comm, x)) * (comm.rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0] * 3, [2.0] * 3], dtype=torch.float64))


@ranks(2, on="threads")
def test_integers_have_no_gradient(comm):
    received = F.alltoall(comm, [torch.tensor([comm.rank, place]) for place in range(2)])
    assert [x.tolist() for x in received] == [[0, comm.rank], [1, comm.rank]] and not received[0].requires_grad


@ranks(2, on="threads")
def test_wrong_arguments_are_refused_on_all_ranks(comm):
    with pytest.raises(torchmn.ArgumentError, match="expected 2 tensors"):
        F.alltoall(comm, [torch.ones(1)] * (2 + comm.rank))
