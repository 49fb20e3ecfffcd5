"""global_mean: the serial mean's value and gradient, on every rank."""

import pytest
import torch

from tests._worlds import ranks
from tests.functions.images import image
from torchmn import ProcessGrid
from torchmn.errors import ArgumentError
from torchmn.functions import global_mean
from torchmn.geometry import all_owned


@ranks(1, 2, 3, 4)
def test_value_and_gradients_are_those_of_the_serial_mean(comm):
    whole = image((2, 7)).requires_grad_()
    serial = (whole**3).mean()
    (expected,) = torch.autograd.grad(serial, whole, create_graph=True)
    (expected_second,) = torch.autograd.grad(expected.square().sum(), whole)

    mine = all_owned(7, comm.size)[comm.rank].as_slice()
    x = whole.detach()[:, mine].clone().requires_grad_()
    loss = global_mean(x**3, ProcessGrid(comm, width=comm.size))
    torch.testing.assert_close(loss, serial.detach(), rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(gradient, expected[:, mine].detach(), rtol=1e-14, atol=0)
    # The sum of squares over ranks, as one loss that counts once: count times its mean.
    penalty = global_mean(gradient.square(), comm) * whole.numel()
    (second,) = torch.autograd.grad(penalty, x)
    torch.testing.assert_close(second, expected_second[:, mine], rtol=1e-12, atol=0)


@ranks(3, on="threads")
def test_all_elements_have_the_same_weight_and_a_rank_may_have_none(comm):
    values = torch.arange(comm.rank, dtype=torch.float32)  # (), (0), (0, 1)
    values.requires_grad_()
    loss = global_mean(values, comm)
    assert loss.item() == pytest.approx(1 / 3) and loss.dtype == torch.float32
    loss.backward()
    assert values.grad.tolist() == pytest.approx([1 / 3] * comm.rank)


@ranks(2, on="threads")
def test_wrong_values_on_one_rank_raise_on_every_rank(comm):
    with pytest.raises(
        ArgumentError, match=r"rank 1 of 2: global_mean: expected floating-point values, got torch.int64"
    ):
        global_mean(torch.ones(3, dtype=torch.int64 if comm.rank else torch.float32), comm)
    with pytest.raises(ArgumentError, match="expected a ProcessGrid or a communicator, got 3"):
        global_mean(torch.ones(3), 3)


@ranks(2, 4, on="threads")
def test_along_data_each_gradient_counts_as_often_as_the_optimizer_divides_it(comm):
    grid = ProcessGrid(comm, data=2, height=comm.size // 2)
    values = torch.full((3,), float(comm.rank), requires_grad=True)
    mean = global_mean(values**2, grid)
    (gradient,) = torch.autograd.grad(mean, values)
    assert mean.item() == pytest.approx(sum(rank**2 for rank in range(comm.size)) / comm.size)
    assert gradient.tolist() == pytest.approx([2 * 2 * comm.rank / (3 * comm.size)] * 3)
    # A loss that has overflowed is infinite, as on one rank, and not NaN.
    assert global_mean(torch.full((2,), float("inf")), grid).item() == float("inf")
