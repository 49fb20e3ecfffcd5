"""L2Pool2d: values and gradients, also of windows that are all zero."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from tests.nn import naive
from torchmn.errors import ArgumentError, HaloError
from torchmn.nn import L2Pool2d

# kernel, stride, eps, padding, image
CASES = {
    "3 x 3, stride 1": ((3, 3), (1, 1), 0.0, (0, 0), (6, 6)),
    "non-square": ((2, 3), (2, 1), 0.0, (0, 0), (7, 5)),
    "padded": ((3, 2), (2, 2), 0.0, (1, 1), (5, 6)),
    "eps": ((3, 3), (1, 1), 0.3, (1, 1), (4, 4)),
    "windows apart": ((2, 2), (3, 4), 0.0, (0, 0), (8, 7)),
}
every_case = pytest.mark.parametrize(("kernel", "stride", "eps", "padding", "size"), CASES.values(), ids=CASES)


@every_case
def test_values_and_gradients_are_those_of_the_formula(kernel, stride, eps, padding, size):
    torch.manual_seed(2)
    layer = L2Pool2d(kernel, stride, eps, padding=padding)
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    assert_close(layer(x), naive.l2_pool(x.detach(), kernel, stride, eps, padding))
    assert gradcheck(layer, (x,))


def test_the_gradient_is_zero_where_the_window_is_all_zero():
    x = torch.zeros(1, 1, 4, 6, dtype=torch.float64)
    x[0, 0, 1, 1] = 3.0
    x[0, 0, 2, 1] = -4.0
    x.requires_grad_()
    y = L2Pool2d(3, 1)(x)
    assert_close(y[0, 0], torch.tensor([[5.0, 5, 0, 0], [5, 5, 0, 0]], dtype=torch.float64))
    y.sum().backward()
    expected = torch.zeros(4, 6, dtype=torch.float64)
    expected[1, 1], expected[2, 1] = 4 * 3 / 5, 4 * -4 / 5  # x / y of each of the four windows
    assert_close(x.grad[0, 0], expected)


def test_with_eps_a_zero_window_is_the_root_of_eps_and_smooth():
    x = torch.zeros(1, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    y = L2Pool2d(3, 1, eps=0.25)(x)
    y.sum().backward()
    assert y.item() == 0.5 and torch.equal(x.grad, torch.zeros_like(x))


def test_a_nan_stays_visible():
    x = torch.zeros(1, 1, 3, 3)
    x[0, 0, 1, 1] = float("nan")
    assert L2Pool2d(3, 1)(x).isnan().all()


def test_the_stride_is_the_kernel_unless_given():
    assert L2Pool2d((2, 3))(torch.ones(1, 1, 4, 6)).shape == (1, 1, 2, 2)


def test_wrong_arguments_are_named():
    with pytest.raises(ArgumentError, match="eps to be at least 0, got -1"):
        L2Pool2d(3, 1, eps=-1)
    with pytest.raises(ArgumentError, match=r"at most half the kernel \(3, 3\), got \(2, 2\)"):
        L2Pool2d(3, 1, padding=2)


def test_second_derivatives_are_exact():
    torch.manual_seed(2)
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(L2Pool2d((3, 2), (2, 1), padding=1), (x,))


def test_an_image_smaller_than_the_kernel_is_refused():
    with pytest.raises(HaloError, match=r"L2Pool2d \(kernel 3, .*\) has no output for an image of 2"):
        L2Pool2d(3, 1)(torch.ones(1, 1, 2, 5))
