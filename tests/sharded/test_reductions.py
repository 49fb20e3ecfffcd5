"""Sums, means, extremes and norms over cut dims, other dims and all dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.sharded.parity import assert_parity

IMAGE = (2, 4, 7, 5)

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: [x.sum(), torch.sum(input=x, dim=(2, 3)), x.sum(0), x.sum((1, 2, 3)), x.sum([1], True)],
    "mean": lambda x: [x.mean(), x.mean((-1, -2), keepdim=True), x.mean(1), x.mean(dim=[0, 1], keepdim=False)],
    "numpy's words": lambda x: [x.mean(axis=(2, 3)), torch.sum(x, (2, 3), keepdims=True), x.amax(axis=1)],
    "amax": lambda x: [x.amax((2, 3)), torch.amin(x, dim=(-2, -1), keepdim=True), x.amax(1), x.max(), x.min()],
    "equal ones": lambda x: [x.clamp(max=0.1).amax((2, 3)), x.clamp(min=0.3).amin((1, 2, 3)), x.clamp(-1, 0).max()],
    "with indices": lambda x: [*x.max(1), *torch.min(x, dim=1, keepdim=True), *x.median(1), *x.topk(2, 1), *x.sort(1)],
    "places": lambda x: [x.argmax(1), x.argmin(dim=-3, keepdim=True)],
    "variance": lambda x: [x.var((2, 3)), x.var((2, 3), False), x.var(), x.var(False), x.var((2, 3), True, True)],
    "variance by name": lambda x: [x.var(dim=1, correction=0), torch.var(x, (2, 3), unbiased=False, keepdim=True)],
    "deviation": lambda x: [x.std((2, 3), keepdim=True), x.std(dim=-3), *torch.var_mean(x, (2, 3)), x.std()],
    "norm": lambda x: [x.norm(dim=1), x.norm(), x.norm(1, (2, 3)), x.norm(p=float("inf"), dim=(2, 3), keepdim=True)],
    "vector norm": lambda x: [torch.linalg.vector_norm(x, dim=(2, 3)), torch.linalg.vector_norm(x, 3, dim=1)],
    "softmax": lambda x: [x.softmax(1), torch.log_softmax(x, dim=-3), torch.logsumexp(x, 1), x.logsumexp(1, True)],
    "running sums": lambda x: [x.cumsum(1), x.cumprod(dim=1), x.prod(1), *x.cummax(1)],
    "truth": lambda x: [(x > 0).all(), (x > 0).any(1), (x > 5).any(), (x > -9).all((2, 3))],
    "a global pool by hand": lambda x: x.view(x.size(0), x.size(1), -1).sum(2) / (x.size(2) * x.size(3)),
}


@pytest.mark.parametrize("grid", [(2, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_reduction_equals_one_rank(function, grid):
    assert_parity(function, IMAGE, grid)


def test_reductions_of_a_line_and_of_a_volume():
    assert_parity(lambda x: [x.mean(-1), x.amax(2), x.std(2)], (2, 3, 10), (3,))
    assert_parity(lambda x: [x.mean((2, 3, 4)), x.amax((2, 3, 4)), x.sum(1)], (2, 3, 3, 4, 5), (2, 1, 2))


def test_the_gradient_of_a_deviation_of_equal_elements_is_zero():
    assert_parity(lambda x: (x * 0).std((1, 2, 3)) + x.std((2, 3)).sum(1), IMAGE)


def test_the_extreme_is_one_of_the_elements():
    """Seven sevenths of 0.7 are not always 0.7, and who looks for the largest elements must find them."""

    def peaks(x: Tensor) -> Any:
        x = x.clamp(max=0.7) / 3
        return [(x == x.amax((2, 3), keepdim=True)) * x, (x >= x.max()) * x, (-x <= (-x).amin((1, 2, 3), True)) * x]

    assert_parity(peaks, (2, 3, 13, 11))


def test_the_largest_integer_is_an_integer():
    assert_parity(lambda x: [x.argmax(1).amax((1, 2)), x.argmax(1).max(), (x > 0).amin((2, 3))], (2, 4, 2, 5), (3, 2))


def test_a_whole_result_is_used_with_parts_again():
    assert_parity(lambda x: (x - x.amin((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True) * x.sum().sigmoid(), IMAGE)


def test_nan_is_propagated():
    x = torch.ones(IMAGE, dtype=torch.float64)
    x[0, 1, 6, 4] = float("nan")

    def reduced(x: Tensor) -> list[Tensor]:
        y = x.detach()  # torch's gradient of NaN is not compared
        return [y.amax((2, 3)), y.max(), F.adaptive_max_pool2d(y, 2), y.mean((2, 3)), F.max_pool2d(y, 2)]

    assert_parity(reduced, IMAGE, x=x)


ATTENTION = {
    "softmax": lambda x: x.flatten(2).softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x.flatten(2), dim=2),
    "soft argmax": lambda x: (x.flatten(2).softmax(-1).view(x.shape) * torch.arange(7.0, dtype=x.dtype)[:, None]).sum(
        (2, 3)
    ),
    "global context": lambda x: (
        x + (x * x[:, :1].flatten(2).softmax(-1).view(x[:, :1].shape)).sum((2, 3), keepdim=True)
    ),
    "in another dtype": lambda x: x.flatten(2).softmax(-1, dtype=torch.float32),
}


@pytest.mark.parametrize("grid", [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("function", ATTENTION.values(), ids=ATTENTION.keys())
def test_attention_over_all_pixels_equals_one_rank(function, grid):
    tolerance = 1e-6 if function is ATTENTION["in another dtype"] else 1e-10
    assert_parity(function, (2, 3, 7, 5), grid, tolerance=tolerance)


def test_softmax_of_rows_where_rows_are_cut():
    assert_parity(lambda x: 50 * x.softmax(2) + x.log_softmax(2), (2, 3, 7, 5), (3, 1))
    assert_parity(lambda x: (1000 * x).softmax(2), (2, 3, 2, 5), (3, 1))  # a rank without rows
