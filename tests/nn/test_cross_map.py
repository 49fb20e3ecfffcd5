"""CrossMapResponseNorm and CrossMapPool against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

from tests.nn import naive
from torchmn.errors import ArgumentError
from torchmn.nn import CrossMapPool, CrossMapResponseNorm


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_response_norm_is_its_formula_with_all_its_gradient(size):
    torch.manual_seed(4)
    layer = CrossMapResponseNorm(size, alpha=0.8, beta=0.4)
    x = torch.randn(2, 6, 3, 2, dtype=torch.float64, requires_grad=True)
    assert_close(layer(x), naive.cross_map_response(x.detach(), size, 0.8, 0.4))
    assert gradcheck(layer, (x,))


def test_pool_sums_the_maps_with_its_weights():
    layer = CrossMapPool(3, 2, dtype=torch.float64)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    y = layer(x)
    for b, o, r, q in naive.places(*y.shape):
        expected = sum(layer.weight[o, i, 0, 0] * x[b, i, r, q] for i in range(3))
        assert_close(y[b, o, r, q], expected)


def test_pool_weights_start_non_negative_and_can_be_made_so_again():
    layer = CrossMapPool(8, 8)
    assert (layer.weight >= 0).all() and layer.weight.detach().std() > 0
    with torch.no_grad():
        layer.weight[0, 0] = -1.0
        kept = layer.weight[1:].clone()
    layer.nonnegative_()
    assert layer.weight[0, 0] == 0 and torch.equal(layer.weight[1:], kept)


def test_wrong_arguments_are_named():
    with pytest.raises(ArgumentError, match="size to be a whole number of at least 1, got 0"):
        CrossMapResponseNorm(0)
    with pytest.raises(ArgumentError, match="out_maps to be a whole number of at least 1, got 'two'"):
        CrossMapPool(2, "two")
