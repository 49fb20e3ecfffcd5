"""Interpolation of a cut image: torch's rounding, and weights across tiles."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.sharded.parity import GRIDS_2D, assert_parity

IMAGE = (2, 2, 7, 5)
MODES = [("nearest", None), ("nearest-exact", None), ("bilinear", False), ("bilinear", True)]
TARGETS = [
    {"scale_factor": 2},
    {"scale_factor": 1.7},
    {"scale_factor": 0.6},
    {"scale_factor": (1.5, 3)},
    {"scale_factor": 1.7, "recompute_scale_factor": True},
    {"size": (4, 13)},
    {"size": 1},
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("mode", "corners"), MODES)
def test_every_setting_of_upsample_equals_one_rank(mode, corners, target):
    assert_parity(nn.Upsample(mode=mode, align_corners=corners, **target), IMAGE, (2, 3))


@pytest.mark.parametrize("grid", GRIDS_2D, ids=str)
def test_upsample_on_every_grid_equals_one_rank(grid):
    assert_parity(nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE, grid)


def test_interpolation_in_one_and_three_dims():
    assert_parity(nn.Upsample(scale_factor=2, mode="linear"), (2, 3, 7), (3,))
    assert_parity(nn.Upsample(size=10, mode="nearest"), (2, 3, 7), (3,))
    assert_parity(
        nn.Upsample(scale_factor=(1.5, 2, 1), mode="trilinear", align_corners=True), (2, 2, 3, 4, 5), (1, 2, 2)
    )


def test_pixel_shuffles_of_uneven_tiles_equal_one_rank():
    assert_parity(nn.PixelShuffle(2), (2, 8, 5, 3), (2, 2))
    assert_parity(nn.PixelShuffle(3), (2, 9, 5, 2), (3, 3))
    assert_parity(nn.PixelUnshuffle(2), (2, 2, 10, 6), (2, 2))
    assert_parity(nn.PixelUnshuffle(3), (2, 2, 9, 6), (2, 3))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from(MODES),
    st.integers(1, 17),
    st.integers(1, 9),
    st.tuples(st.integers(1, 31), st.integers(1, 31)) | st.floats(0.4, 3.5),
    st.sampled_from([(2, 2), (1, 3)]),
)
def test_any_size_and_scale_equals_one_rank(mode, height, width, target, grid):
    kind, corners = mode
    options = {"size": target} if isinstance(target, tuple) else {"scale_factor": target}
    if isinstance(target, float) and min(int(height * target), int(width * target)) < 1:
        return
    assert_parity(lambda x: F.interpolate(x, mode=kind, align_corners=corners, **options), (1, 2, height, width), grid)
