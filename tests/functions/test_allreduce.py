"""allreduce: the sum of all ranks' tensors, and of all ranks' gradients."""

import pytest
import torch

import torchmn
from tests._worlds import ranks
from tests.functions.serial import check_adjoint, check_against_serial, leaf
from torchmn import functions as F

REDUCED = {
    "sum": lambda xs: sum(xs),
    "mean": lambda xs: sum(xs) / len(xs),
    "max": lambda xs: torch.stack(xs).amax(0),
    "min": lambda xs: torch.stack(xs).amin(0),
    "prod": lambda xs: torch.stack(xs).prod(0),
}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_its_adjoint_is_exact(comm, op):
    check_adjoint(comm, lambda x: F.allreduce(comm, x, op), [leaf(3, 4, seed=comm.rank)])


@ranks(1, 2, 3, 4, 6, on="threads")
@ranks(2, on=["mpi", "gloo"])
@pytest.mark.parametrize("op", REDUCED)
def test_values_gradients_and_their_gradients_equal_those_of_one_rank(comm, op):
    check_against_serial(
        comm,
        lambda x: F.allreduce(comm, x, op),
        lambda inputs_by_rank: [REDUCED[op]([x for (x,) in inputs_by_rank])] * comm.size,
        lambda rank: [leaf(2, 3, seed=rank)],
    )


@ranks(3, on="threads")
def test_the_gradient_of_a_maximum_that_several_ranks_have_is_divided(comm):
    x = torch.tensor([1.0, 2.0 if comm.rank else 0.0], requires_grad=True)
    F.allreduce(comm, x, "max").sum().backward()
    assert torch.allclose(x.grad, torch.tensor([1.0, 1.5 if comm.rank else 0.0]))


@ranks(3, on="threads")
def test_the_gradient_of_a_product_with_zeros_is_right(comm):
    x = torch.tensor([float(comm.rank), 2.0], requires_grad=True)
    F.allreduce(comm, x, "prod").sum().backward()
    assert torch.allclose(x.grad, torch.tensor([3 * 2.0 if comm.rank == 0 else 0.0, 3 * 4.0]))


@ranks(3)
def test_a_rank_that_needs_no_gradient_takes_part_in_the_backward_of_those_that_do(comm):
    x = torch.ones(2, requires_grad=comm.rank == 1)
    (F.allreduce(comm, x) * (comm.rank + 1)).sum().backward()
    if comm.rank == 1:
        assert torch.equal(x.grad, torch.full((2,), 6.0))


@ranks(2, on="threads")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_floats_keep_their_dtype(comm, dtype):
    x = torch.full((3,), 1.5, dtype=dtype, requires_grad=True)
    y = F.allreduce(comm, x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert y.tolist() == [3.0] * 3 and x.grad.tolist() == [2.0] * 3


@ranks(2, 3, on="threads")
def test_what_needs_no_gradient_anywhere_gets_none(comm):
    for x in (torch.arange(3), torch.tensor([True, False]), torch.ones(2), torch.ones(0)):
        total = F.allreduce(comm, x)
        assert torch.equal(total, comm.allreduce(x)) and not total.requires_grad
    with torch.no_grad():
        assert not F.allreduce(comm, leaf(2, seed=0)).requires_grad
    with torch.inference_mode():
        assert not F.allreduce(comm, leaf(2, seed=0)).requires_grad


@ranks(4, on="threads")
def test_on_a_sub_communicator_its_ranks_alone_are_summed(comm):
    pair = comm.split(comm.rank % 2)
    x = leaf(2, seed=comm.rank)
    (F.allreduce(pair, x) * (comm.rank + 1)).sum().backward()
    expected = {0: 1.0 + 3.0, 1: 2.0 + 4.0}[comm.rank % 2]
    assert torch.equal(x.grad, torch.full((2,), expected, dtype=torch.float64))


@ranks(2)
def test_a_rank_under_no_grad_among_ranks_that_need_a_gradient_is_refused_on_all(comm):
    x = torch.ones(2, requires_grad=True)
    with (
        torch.set_grad_enabled(comm.rank != 0),
        pytest.raises(torchmn.MismatchError, match=r"gradient on rank 1, but rank 0 called it under torch.no_grad"),
    ):
        F.allreduce(comm, x)


@ranks(2)
def test_a_plain_allreduce_beside_a_differentiable_one_is_refused_on_all(comm):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(torchmn.MismatchError, match=r"allreduce \(torchmn.functions call 1\)"):
        F.allreduce(comm, x) if comm.rank else comm.allreduce(x)


@ranks(2)
def test_a_backward_that_skips_a_call_gets_an_error_and_not_another_calls_gradient(comm):
    x = torch.ones(2, requires_grad=True)
    first, second = F.allreduce(comm, x * 2), F.allreduce(comm, x * 3)
    loss = first.sum() if comm.rank else first.sum() + second.sum()
    with pytest.raises(torchmn.MismatchError, match=r"backward of torchmn.functions call 2\)"):
        loss.backward()


@ranks(2, on="threads")
def test_wrong_arguments_are_refused_on_all_ranks(comm):
    with pytest.raises(torchmn.ArgumentError, match="op"):
        F.allreduce(comm, torch.ones(1), op="sum" if comm.rank else "avg")
    with pytest.raises(torchmn.MismatchError, match="shape"):
        F.allreduce(comm, torch.ones(1 + comm.rank, requires_grad=True))
    with pytest.raises(torchmn.ArgumentError, match="expected a tensor, got 3"):
        F.allreduce(comm, 3 if comm.rank else torch.ones(1))


@ranks(2, on="threads")
def test_recomputing_it_on_all_ranks_is_right(comm):
    from torch.utils.checkpoint import checkpoint

    weight = leaf(3, 3, seed=comm.rank)

    def part(x):
        return F.allreduce(comm, (x @ weight).tanh()).sin()

    x = leaf(2, 3, seed=9).detach()
    part(part(x)).sum().backward()
    expected, weight.grad = weight.grad, None
    checkpoint(part, checkpoint(part, x, use_reentrant=False), use_reentrant=False).sum().backward()
    torch.testing.assert_close(weight.grad, expected)


@ranks(2, on="threads")
def test_recomputing_it_on_one_rank_is_right_if_its_messages_are_kept(comm):
    from torch.utils.checkpoint import checkpoint

    weight = leaf(3, 3, seed=comm.rank)

    def part(x):
        return F.allreduce(comm, (x @ weight).tanh()).sin()

    def run(x):
        return part(x) if comm.rank else checkpoint(part, x, use_reentrant=False, context_fn=F.keep_messages)

    x = leaf(2, 3, seed=9).detach()
    part(part(x)).sum().backward()
    expected, weight.grad = weight.grad, None
    run(run(x)).sum().backward()
    torch.testing.assert_close(weight.grad, expected)
