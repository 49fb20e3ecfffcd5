"""scatter: one of the root's tensors for each rank; the gradients return to the root."""

import pytest
import torch

import torchmn
from tests._worlds import ranks
from tests._worlds.data import roots
from tests.functions.serial import check_adjoint, check_against_serial, leaf
from torchmn import functions as F


@ranks(1, 2, 3, 4)
def test_its_adjoint_is_exact_from_any_root(comm):
    for root in roots(comm):
        inputs = [leaf(3, 1 + place, seed=place) for place in range(comm.size)] if comm.rank == root else []
        check_adjoint(comm, lambda *xs, root=root: F.scatter(comm, xs or None, root), inputs)


@ranks(1, 2, 3, 4, on="threads")
@ranks(2, on=["mpi", "gloo"])
def test_values_gradients_and_their_gradients_equal_those_of_one_rank(comm):
    """Other ranks pass tensors to which their graph continues, or the second backward would end there."""
    for root in roots(comm):

        def serial(inputs_by_rank, root=root):
            own = [0 * sum(x.sum() for x in inputs) for inputs in inputs_by_rank]
            return [inputs_by_rank[root][rank] + own[rank] for rank in range(comm.size)]

        check_against_serial(
            comm,
            lambda *xs, root=root: F.scatter(comm, xs, root),
            serial,
            lambda rank: [leaf(place, 3, seed=17 * rank + place) for place in range(comm.size)],
        )


@ranks(2)
def test_one_tensor_with_a_row_per_rank_is_accepted(comm):
    x = leaf(2, 3, seed=4)
    mine = F.scatter(comm, x if comm.rank == 1 else None, root=1)
    assert torch.equal(mine, x[comm.rank])
    (mine * (comm.rank + 1)).sum().backward()
    assert comm.rank == 0 or x.grad.tolist() == [[1.0] * 3, [2.0] * 3]


@ranks(2, on="threads")
def test_bools_have_no_gradient(comm):
    mine = F.scatter(comm, [torch.tensor(True), torch.tensor([False] * 2)] if comm.rank == 0 else None)
    assert mine.tolist() == ([False] * 2 if comm.rank else True) and not mine.requires_grad


@ranks(2, on="threads")
def test_a_wrong_argument_of_the_root_is_refused_on_all_ranks(comm):
    with pytest.raises(torchmn.ArgumentError, match="expected 2 tensors, one per rank, got 3"):
        F.scatter(comm, [torch.ones(1)] * 3 if comm.rank == 0 else None)
