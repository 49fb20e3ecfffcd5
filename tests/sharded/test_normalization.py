"""Normalisation with statistics over all ranks; running statistics too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sharded.parity import GRIDS_2D, assert_parity

IMAGE = (3, 4, 7, 5)


def randomized(net: nn.Module) -> nn.Module:
    """Parameters and statistics that are not all zeros and ones."""
    with torch.no_grad():
        for x in (*net.parameters(), *net.buffers()):
            if x.is_floating_point():
                x.uniform_(0.5, 1.5)
    return net


LAYERS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch, cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "batch, plain": lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    "group": lambda: nn.GroupNorm(2, 4),
    "group of one": lambda: nn.GroupNorm(4, 4, affine=False),
    "instance": lambda: nn.InstanceNorm2d(4),
    "instance, tracked": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "layer over all": lambda: nn.LayerNorm([4, 7, 5]),
    "layer over the image": lambda: nn.LayerNorm([7, 5], elementwise_affine=False),
    "local response": lambda: nn.LocalResponseNorm(3, alpha=0.1),
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_every_normalization_equals_one_rank(layer, train):
    assert_parity(randomized(layer()), IMAGE, (2, 3), train=train)


@pytest.mark.parametrize("grid", GRIDS_2D, ids=str)
def test_batch_norm_on_every_grid_equals_one_rank(grid):
    assert_parity(nn.Sequential(nn.Conv2d(4, 3, 3), randomized(nn.BatchNorm2d(3)), nn.ReLU()), IMAGE, grid)


@pytest.mark.parametrize("grid", [{"data": 2, "height": 2}, {"data": 3, "width": 2}], ids=str)
@pytest.mark.parametrize("layer", [LAYERS["batch"], LAYERS["instance, tracked"], LAYERS["group"]])
def test_statistics_over_tiles_and_uneven_micro_batches_together(layer, grid):
    assert_parity(nn.Sequential(nn.Conv2d(4, 4, 3), randomized(layer())), (5, 4, 7, 5), grid)


def test_normalizations_in_one_and_three_dims():
    assert_parity(nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3)), (2, 3, 13), (3,))
    assert_parity(nn.Sequential(nn.BatchNorm3d(3), nn.GroupNorm(1, 3)), (2, 3, 4, 5, 6), (1, 2, 2))


class ChannelsLast(nn.Module):
    """The block of a ConvNeXt: layer norm and linear layers over the channels of every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(4), nn.Linear(4, 9), nn.Linear(9, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(F.gelu(self.wide(self.norm(x.permute(0, 2, 3, 1)))))
        return x + (self.scale * y).permute(0, 3, 1, 2)


@pytest.mark.parametrize("grid", [(2, 2), (3, 2)], ids=str)
def test_layer_norm_and_linear_over_channels_equal_one_rank(grid):
    assert_parity(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), ChannelsLast()), IMAGE, grid)


@pytest.mark.parametrize(("p", "dim"), [(2, 1), (1, -3), (3, 1), (float("inf"), 1), (2, (2, 3))])
def test_divided_by_a_norm(p, dim):
    x = torch.randn(IMAGE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[:, :, 2, 3] = 0  # the gradient of a norm at zero is zero
    assert_parity(lambda x: F.normalize(x, p=p, dim=dim), IMAGE, (2, 2), x=x)


def test_statistics_far_from_zero_keep_their_digits():
    x = torch.randn(IMAGE, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 1e-3 + 1e3
    for layer in (nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)):
        assert_parity(layer.double(), IMAGE, (2, 2), x=x, tolerance=1e-8)
