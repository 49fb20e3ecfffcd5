"""Pools of a cut image: windows, counts at the borders, adaptive bins."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.sharded.parity import GRIDS_2D, assert_parity, numbers
from torchmn import ProcessGrid, run_threads
from torchmn.parallel import parallelize
from torchmn.sharded import ShardedTensor

IMAGE = (2, 3, 11, 9)


@pytest.mark.parametrize("grid", GRIDS_2D, ids=str)
def test_pools_on_every_grid_equal_one_rank(grid):
    assert_parity(nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)), IMAGE, grid)


WINDOWS = [
    (2, 2, 0, False),
    (3, 2, 1, True),
    (3, 1, 1, False),
    (5, 4, 2, True),
    (2, 3, 1, True),
    ((3, 2), (2, 1), 1, False),
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "ceil"), WINDOWS)
def test_every_setting_of_a_max_pool_equals_one_rank(kernel, stride, padding, ceil):
    assert_parity(nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil), IMAGE, (2, 3))
    assert_parity(nn.MaxPool2d(kernel, stride, padding, dilation=2, ceil_mode=ceil), IMAGE, (2, 2))


@pytest.mark.parametrize("divisor", [None, 5])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(("kernel", "stride", "padding", "ceil"), WINDOWS)
def test_every_setting_of_an_average_pool_equals_one_rank(kernel, stride, padding, ceil, include, divisor):
    assert_parity(nn.AvgPool2d(kernel, stride, padding, ceil, include, divisor), IMAGE, (2, 3))


def test_pools_in_one_and_three_dims():
    assert_parity(nn.Sequential(nn.MaxPool1d(3, 2, 1), nn.AvgPool1d(2, ceil_mode=True)), (2, 3, 17), (3,))
    assert_parity(nn.Sequential(nn.MaxPool3d(2, 1), nn.AvgPool3d(2, 1, 1)), (2, 2, 4, 5, 6), (1, 2, 2))
    assert_parity(nn.Sequential(nn.LPPool1d(2, 3, 2)), (2, 3, 13), (2,))


@pytest.mark.parametrize(
    "pool", [nn.LPPool2d(2, 3, 2), nn.LPPool2d(3, 2, ceil_mode=True), nn.LPPool2d(1, (2, 3))], ids=str
)
def test_power_average_pools_equal_one_rank(pool):
    assert_parity(pool, IMAGE, (2, 3))


def test_the_gradient_of_equal_maxima_goes_where_torch_sends_it():
    x = torch.ones(1, 2, 8, 8, dtype=torch.float64)
    for net in (nn.MaxPool2d(3, 2, 1), nn.AdaptiveMaxPool2d(3), nn.AdaptiveMaxPool2d(1)):
        assert_parity(net, x.shape, (2, 2), x=x)


ADAPTIVE = [1, 2, 3, 7, (1, 7), (None, 3), (5, None), (13, 2)]


@pytest.mark.parametrize("grid", [(2, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("size", ADAPTIVE, ids=str)
def test_adaptive_pools_of_any_size_equal_one_rank(size, grid):
    assert_parity(nn.AdaptiveAvgPool2d(size), IMAGE, grid)
    assert_parity(nn.AdaptiveMaxPool2d(size), IMAGE, grid)


def test_adaptive_pools_in_one_and_three_dims():
    assert_parity(nn.AdaptiveAvgPool1d(4), (2, 3, 13), (3,))
    assert_parity(nn.AdaptiveMaxPool1d(4), (2, 3, 13), (3,))
    assert_parity(nn.AdaptiveAvgPool3d((2, 1, 3)), (2, 3, 4, 5, 6), (1, 2, 2))
    assert_parity(nn.AdaptiveMaxPool3d((2, 1, 3)), (2, 3, 4, 5, 6), (1, 2, 2))


def test_an_adaptive_average_stays_cut_where_every_rank_gets_bins():
    class Looks(nn.Module):
        kinds: list[type]

        def forward(self, x):
            Looks.kinds.append(type(x))
            return x

    def kinds_of(size):
        Looks.kinds = []
        net = nn.Sequential(nn.AdaptiveAvgPool2d(size), Looks())
        x = numbers((2, 3, 14, 14))

        def body(comm):
            return parallelize(net, ProcessGrid(comm, height=2, width=2), "halopar", input_shape=(3, 14, 14))(x)

        for got in run_threads(body, 4):
            torch.testing.assert_close(got, F.adaptive_avg_pool2d(x, size))
        return set(Looks.kinds) - {torch.Tensor}

    assert kinds_of(7) == {ShardedTensor}
    assert kinds_of(1) == set()


def test_ranks_without_a_part_pool_too():
    net = nn.Sequential(nn.Conv2d(2, 2, 3, stride=4), nn.AdaptiveMaxPool2d(1))
    assert_parity(net, (2, 2, 7, 7), (3, 3))
    assert_parity(nn.Sequential(net[0], nn.AdaptiveAvgPool2d((3, 4))), (2, 2, 7, 7), (3, 3))


pools = st.integers(1, 5).flatmap(
    lambda kernel: st.tuples(st.just(kernel), st.integers(1, 4), st.integers(0, kernel // 2))
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(pools, pools, st.integers(1, 12), st.integers(1, 12), st.sampled_from(GRIDS_2D), st.booleans(), st.booleans())
def test_any_pool_on_any_size_and_grid_equals_one_rank(rows, columns, height, width, grid, ceil, average):
    kernel, stride, padding = zip(rows, columns, strict=True)
    options = {"ceil_mode": ceil, **({"count_include_pad": False} if average else {})}
    net = (nn.AvgPool2d if average else nn.MaxPool2d)(kernel, stride, padding, **options)
    try:
        net(torch.zeros(1, 2, height, width))
    except RuntimeError:
        return  # no output on one rank either
    assert_parity(net, (2, 2, height, width), grid)
