"""bcast: the root's tensor on every rank; the root's gradient is the sum over ranks."""

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
        inputs = [leaf(3, 4, seed=root)] if comm.rank == root else []
        check_adjoint(comm, lambda x=None, root=root: F.bcast(comm, x, root), inputs)


@ranks(1, 2, 3, 4, 6, on="threads")
@ranks(2, on=["mpi", "gloo"])
def test_values_gradients_and_their_gradients_equal_those_of_one_rank(comm):
    """Other ranks pass a tensor to which their graph continues, or the second backward would end there."""
    for root in roots(comm):

        def serial(inputs_by_rank, root=root):
            (x,) = inputs_by_rank[root]
            return [x + 0 * own.sum() for (own,) in inputs_by_rank]

        check_against_serial(
            comm, lambda x, root=root: F.bcast(comm, x, root), serial, lambda rank: [leaf(2, 3, seed=rank)]
        )


@ranks(2, 3)
def test_a_graph_of_gather_and_bcast_stays_in_one_piece_on_every_rank(comm):
    root = comm.size - 1
    x = leaf(3, seed=comm.rank)
    gathered = F.gather(comm, x, root)
    mixed = sum(n * part for n, part in enumerate(gathered, 1)) if comm.rank == root else gathered
    (F.bcast(comm, mixed, root) * (comm.rank + 1)).sum().backward()
    total = sum(rank + 1 for rank in range(comm.size))
    assert torch.equal(x.grad, torch.full((3,), float((comm.rank + 1) * total), dtype=torch.float64))


@ranks(2)
def test_the_result_is_not_the_roots_own_memory(comm):
    x = torch.ones(2, requires_grad=True)
    y = F.bcast(comm, x if comm.rank == 0 else None)
    y.mul_(3)
    assert x.tolist() == [1.0, 1.0]
    y.sum().backward()
    assert comm.rank or x.grad.tolist() == [6.0, 6.0]


@ranks(2, on="threads")
@pytest.mark.parametrize("x", [torch.arange(3), torch.tensor(True), torch.ones(2), torch.ones(0, 2)], ids=str)
def test_what_needs_no_gradient_gets_none(comm, x):
    y = F.bcast(comm, x if comm.rank == 1 else None, root=1)
    assert torch.equal(y, x) and y.dtype == x.dtype and not y.requires_grad


@ranks(2, on="threads")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_keep_their_dtype(comm, dtype):
    x = torch.full((3,), 1.5, dtype=dtype, requires_grad=True)
    y = F.bcast(comm, x)
    y.sum().backward()
    assert y.dtype == dtype
    assert comm.rank or (x.grad.dtype == dtype and x.grad.tolist() == [2.0] * 3)


@ranks(2, on="threads")
def test_a_wrong_argument_of_the_root_is_refused_on_all_ranks(comm):
    with pytest.raises(torchmn.ArgumentError, match="expected a tensor, got 'x'"):
        F.bcast(comm, "x" if comm.rank == 0 else None)
    with pytest.raises(torchmn.ArgumentError, match=r"expected root in 0..1, got 5"):
        F.bcast(comm, torch.ones(1), root=5)
