"""LocalContrastNorm2d: both kinds against their formulas, flat areas, full gradients."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

from tests.nn import naive
from torchmn.errors import ArgumentError
from torchmn.nn import LocalContrastNorm2d

every_window = pytest.mark.parametrize(
    ("kernel", "size"), [((3, 3), (5, 6)), ((5, 3), (6, 4)), ((7, 7), (4, 5)), ((1, 1), (3, 3)), ((1, 5), (3, 7))]
)


def images(maps: int, size: tuple[int, int], batch: int = 2) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(batch, maps, *size, dtype=torch.float64, requires_grad=True)


@every_window
@pytest.mark.parametrize("maps", [2, 3])
def test_subtractive_divisive_is_its_formula_with_all_its_gradient(kernel, size, maps):
    layer = LocalContrastNorm2d(kernel, maps, dtype=torch.float64)
    x = images(maps, size)
    assert_close(layer(x), naive.subtractive_divisive(x.detach(), kernel))
    assert gradcheck(layer, (x[:1].detach().requires_grad_(),))


@every_window
def test_response_is_its_formula_with_all_its_gradient(kernel, size):
    layer = LocalContrastNorm2d(kernel, 2, "response", alpha=0.7, beta=0.6)
    x = images(2, size)
    assert_close(layer(x), naive.contrast_response(x.detach(), kernel, 0.7, 0.6))
    assert gradcheck(layer, (x[:1].detach().requires_grad_(),))


@pytest.mark.parametrize(("kernel", "size"), [((2, 2), (5, 6)), ((4, 3), (6, 4))])
def test_an_even_window_of_responses_begins_half_before_its_pixel(kernel, size):
    layer = LocalContrastNorm2d(kernel, 2, "response", alpha=0.7, beta=0.6)
    x = images(2, size)
    assert_close(layer(x), naive.contrast_response(x.detach(), kernel, 0.7, 0.6))
    assert gradcheck(layer, (x[:1].detach().requires_grad_(),))


def test_an_area_of_zeros_stays_zero_and_its_gradient_finite():
    x = torch.zeros(1, 2, 7, 7, dtype=torch.float64)
    x[:, :, :2, :2] = torch.rand(1, 2, 2, 2, dtype=torch.float64)
    x.requires_grad_()
    y = LocalContrastNorm2d(3, 2, dtype=torch.float64)(x)
    assert_close(y, naive.subtractive_divisive(x.detach(), (3, 3)))
    assert torch.equal(y[:, :, 4:, 4:], torch.zeros(1, 2, 3, 3, dtype=torch.float64))
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_contrast_up_to_the_threshold_is_not_amplified():
    x = 1e-3 * images(2, (5, 5)).detach()
    layer = LocalContrastNorm2d(3, 2, threshold=0.1, dtype=torch.float64)
    assert_close(layer(x), naive.subtractive_divisive(x, (3, 3), threshold=0.1))
    assert layer(x).abs().max() < 0.01 < LocalContrastNorm2d(3, 2, dtype=torch.float64)(x).abs().max()


def test_the_gaussian_sums_to_1_over_window_and_maps():
    window = LocalContrastNorm2d(3, 4, dtype=torch.float64).gaussian
    assert window.shape == (1, 1, 3, 3)
    assert_close(4 * window.sum(), torch.tensor(1.0, dtype=torch.float64))
    # deviation √2 / 3: one pixel aside exp(-9 / 4), along the diagonal exp(-9 / 2)
    assert_close(
        window[0, 0] / window[0, 0, 1, 1],
        torch.exp(-9 / 4 * torch.tensor([[2.0, 1, 2], [1, 0, 1], [2, 1, 2]], dtype=torch.float64)),
    )


def test_it_has_nothing_to_learn_or_to_save():
    layer = LocalContrastNorm2d(3, 2)
    assert not list(layer.parameters()) and not layer.state_dict()
    assert layer.double().gaussian.dtype == torch.float64


def test_wrong_arguments_are_named():
    with pytest.raises(ArgumentError, match=r"kernel to be odd.*got 4. Use \(5, 5\)"):
        LocalContrastNorm2d(4, 2)
    with pytest.raises(ArgumentError, match=r"kind 'respond' does not exist. Did you mean 'response'"):
        LocalContrastNorm2d(3, 2, "respond")
    with pytest.raises(ArgumentError, match="alpha has no meaning for kind 'subtractive-divisive'"):
        LocalContrastNorm2d(3, 2, alpha=1.0)
    with pytest.raises(ArgumentError, match="threshold has no meaning for kind 'response'"):
        LocalContrastNorm2d(3, 2, "response", threshold=1.0)
    with pytest.raises(ArgumentError, match=r"expected \(batch, 2, height, width\), got \(1, 3, 4, 4\)"):
        LocalContrastNorm2d(3, 2)(torch.zeros(1, 3, 4, 4))
