"""reduce_scatter: each rank's sum over ranks; the gradient is an all-gather."""

import pytest
import torch

import torchmn
from tests._worlds import ranks
from tests.functions.serial import check_adjoint, check_against_serial, leaf
from tests.functions.test_allreduce import REDUCED
from torchmn import functions as F


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_its_adjoint_is_exact(comm, op):
    xs = [leaf(3, place, seed=17 * comm.rank + place) for place in range(comm.size)]
    if comm.size == 1:
        xs = [leaf(3, 2, seed=0)]
    check_adjoint(comm, lambda *xs: F.reduce_scatter(comm, xs, op), xs)


@ranks(1, 2, 3, 4, on="threads")
@ranks(2, on=["mpi", "gloo"])
@pytest.mark.parametrize("op", REDUCED)
def test_values_gradients_and_their_gradients_equal_those_of_one_rank(comm, op):
    check_against_serial(
        comm,
        lambda *xs: F.reduce_scatter(comm, xs, op),
        lambda inputs_by_rank: [REDUCED[op]([xs[place] for xs in inputs_by_rank]) for place in range(comm.size)],
        lambda rank: [leaf(2, 1 + place, seed=17 * rank + place) for place in range(comm.size)],
    )


@ranks(2, on="threads")
def test_one_tensor_with_a_row_per_rank_is_accepted(comm):
    x = leaf(2, 3, seed=comm.rank)
    (F.reduce_scatter(comm, x) * (comm.rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0] * 3, [2.0] * 3], dtype=torch.float64))


@ranks(2, on="threads")
def test_wrong_arguments_are_refused_on_all_ranks(comm):
    with pytest.raises(torchmn.ArgumentError, match="expected 2 tensors"):
        F.reduce_scatter(comm, [torch.ones(1)] * (2 + comm.rank))
