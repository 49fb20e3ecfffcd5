"""Convolutions of a cut image equal those of the whole image: every setting, any grid, uneven tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.sharded.parity import GRIDS_2D, assert_parity

IMAGE = (2, 4, 11, 9)


@pytest.mark.parametrize("grid", GRIDS_2D, ids=str)
def test_a_convolution_on_every_grid_equals_one_rank(grid):
    assert_parity(nn.Conv2d(4, 6, 3, padding=1), IMAGE, grid)


SETTINGS: dict[str, dict[str, Any]] = {
    "stride 2": {"stride": 2},
    "stride 3, no padding": {"stride": 3, "padding": 0},
    "stride larger than kernel": {"kernel_size": 2, "stride": 3},
    "same": {"padding": "same"},
    "same, even kernel": {"kernel_size": 4, "padding": "same"},
    "valid": {"padding": "valid"},
    "dilation": {"dilation": 2, "padding": 2},
    "dilation and stride": {"dilation": (3, 2), "stride": (1, 2), "padding": (3, 0)},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "bias": False},
    "1x1": {"kernel_size": 1, "padding": 0},
    "1x1, stride 2": {"kernel_size": 1, "stride": 2, "padding": 0},
    "oblong": {"kernel_size": (1, 5), "padding": (0, 2)},
    "more padding than kernel": {"kernel_size": 2, "padding": 3},
    "stem": {"kernel_size": 7, "stride": 2, "padding": 3},
    "reflect": {"padding_mode": "reflect", "padding": (1, 2)},
    "replicate": {"padding_mode": "replicate", "padding": (2, 1)},
    "circular": {"padding_mode": "circular", "padding": 2},
    "reflect, same, stride": {"padding_mode": "reflect", "padding": "same", "kernel_size": 4},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_of_a_convolution_equals_one_rank(options):
    assert_parity(nn.Conv2d(4, 4, **{"kernel_size": 3, "padding": 1, **options}), IMAGE, (3, 2))


@pytest.mark.parametrize(("grid", "size"), [((3,), 17), ((4,), 9), ({"height": 2}, 12)], ids=str)
def test_a_convolution_in_one_dim(grid, size):
    assert_parity(nn.Conv1d(3, 4, 5, stride=2, padding=2), (2, 3, size), grid)


@pytest.mark.parametrize("grid", [(1, 1, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2)], ids=str)
def test_a_convolution_in_three_dims(grid):
    assert_parity(nn.Conv3d(2, 3, (3, 2, 3), stride=(1, 2, 1), padding=1), (2, 2, 5, 6, 7), grid)


@pytest.mark.parametrize("grid", [(2, 2), (3, 3)], ids=str)
def test_a_halo_wider_than_the_neighbour_comes_from_further_away(grid):
    assert_parity(nn.Conv2d(2, 3, 7, padding=3), (2, 2, 6, 5), grid)


def test_parts_without_an_output_take_part():
    # 7x7 becomes 2x2: on a 3x3 grid five of nine ranks have nothing, and the next layer makes nothing of it.
    net = nn.Sequential(nn.Conv2d(2, 3, 3, stride=4), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1))
    assert_parity(net, (2, 2, 7, 7), (3, 3))


def test_more_ranks_than_rows():
    assert_parity(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2, ceil_mode=True)), (2, 2, 2, 7), (3, 2))


def test_layers_after_one_another_and_a_skip():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.skip = nn.Conv2d(3, 4, 1, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.second(F.relu(self.first(x))) + self.skip(x))

    assert_parity(Block(), (2, 3, 11, 9), (2, 3))


def test_a_filter_that_is_used_twice_and_one_that_is_computed():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.scale = nn.Parameter(torch.ones(3) * 0.7)

        def forward(self, x: Tensor) -> Tensor:
            scaled = self.conv.weight * self.scale.view(3, 1, 1, 1)
            return F.conv2d(self.conv(self.conv(x)), scaled, padding="same") + self.conv.weight.sum()

    assert_parity(Twice(), (2, 3, 7, 5), (2, 2))


def test_frozen_filters_pass_the_gradient_on():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).double()
    net[1].requires_grad_(False)
    assert_parity(net, (2, 3, 8, 7), (2, 2))


def test_spectral_and_weight_norm():
    net = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1)),
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 2, 3)),
    )
    assert_parity(net, (2, 3, 8, 7), (2, 2))


TRANSPOSED: dict[str, dict[str, Any]] = {
    "doubling": {"kernel_size": 2, "stride": 2},
    "stride larger than kernel": {"kernel_size": 2, "stride": 4},
    "output_padding": {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    "output_padding, stride 3": {"kernel_size": 2, "stride": 3, "padding": 1, "output_padding": 2},
    "dilation": {"kernel_size": 3, "dilation": 2, "stride": 2, "padding": 1},
    "groups": {"kernel_size": 4, "stride": 2, "padding": 1, "groups": 2},
    "stride 1": {"kernel_size": 3, "padding": 2, "bias": False},
}


@pytest.mark.parametrize("grid", [(2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("options", TRANSPOSED.values(), ids=TRANSPOSED)
def test_every_setting_of_a_transposed_convolution_equals_one_rank(options, grid):
    assert_parity(nn.ConvTranspose2d(4, 6, **options), (2, 4, 5, 7), grid)


def test_transposed_convolutions_in_one_and_three_dims():
    assert_parity(nn.ConvTranspose1d(3, 4, 4, 2, 1), (2, 3, 7), (3,))
    assert_parity(nn.ConvTranspose3d(2, 3, 2, 2), (2, 2, 3, 4, 5), (2, 1, 2))


windows = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.integers(1, 3))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(windows, windows, st.integers(1, 13), st.integers(1, 13), st.sampled_from(GRIDS_2D), st.booleans())
def test_any_window_on_any_size_and_grid_equals_one_rank(rows, columns, height, width, grid, transposed):
    kernel, stride, padding, dilation = zip(rows, columns, strict=True)
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    net = kind(2, 2, kernel, stride, padding, dilation=dilation)
    try:
        net(torch.zeros(1, 2, height, width))
    except RuntimeError:
        return  # no output on one rank either
    assert_parity(net, (2, 2, height, width), grid)
