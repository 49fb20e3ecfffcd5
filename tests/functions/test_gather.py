"""gather: the tensors of all ranks on the root; each gradient returns to its rank."""

import pytest
import torch

import torchmn
from tests._worlds import ranks
from tests._worlds.data import roots
from tests.functions.serial import check_adjoint, check_against_serial, leaf
from torchmn import functions as F


@ranks(1, 2, 3, 4)
def test_its_adjoint_is_exact_to_any_root(comm):
    for root in roots(comm):
        check_adjoint(comm, lambda x, root=root: F.gather(comm, x, root), [leaf(2, 3, seed=comm.rank)])


@ranks(1, 2, 3, 4, on="threads")
@ranks(2, on=["mpi", "gloo"])
@pytest.mark.parametrize("ragged", [False, True])
def test_values_gradients_and_their_gradients_equal_those_of_one_rank(comm, ragged):
    for root in roots(comm):

        def serial(inputs_by_rank, root=root):
            delegate = torch.zeros(())
            return [[x for (x,) in inputs_by_rank] if rank == root else delegate for rank in range(comm.size)]

        check_against_serial(
            comm,
            lambda x, root=root: F.gather(comm, x, root),
            serial,
            lambda rank: [leaf(rank if ragged else 2, 3, seed=rank)],
        )


@ranks(3)
def test_other_ranks_get_a_delegate_on_which_they_call_backward(comm):
    x = leaf(2, seed=comm.rank)
    gathered = F.gather(comm, x, root=1)
    if comm.rank == 1:
        (gathered[0] * 5 + gathered[2] * 7).sum().backward()
    else:
        assert gathered.dim() == 0 and gathered.item() == 0.0
        gathered.backward()
    assert x.grad.tolist() == [{0: 5.0, 1: 0.0, 2: 7.0}[comm.rank]] * 2


@ranks(2, on="threads")
def test_integers_have_no_gradient(comm):
    gathered = F.gather(comm, torch.arange(comm.rank))
    assert not (gathered if comm.rank else gathered[0]).requires_grad
    assert comm.rank or [x.tolist() for x in gathered] == [[], [0]]


@ranks(2, on="threads")
def test_a_wrong_root_is_refused_on_all_ranks(comm):
    with pytest.raises(torchmn.MismatchError, match="root"):
        F.gather(comm, torch.ones(1, requires_grad=True), root=comm.rank)
