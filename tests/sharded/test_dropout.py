"""Dropout on sharded tensors has the mask of one rank, for every memory format."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.sharded.parity import assert_parity, numbers

IMAGE = (4, 4, 7, 5)
SHAPES = {
    "as it is": lambda x: F.dropout(x, 0.4),
    "channels": lambda x: F.dropout2d(x, 0.4),
    "by name": lambda x: F.dropout(input=x, p=0.3, training=True),
    "in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "all": lambda x: F.dropout(x, 1.0),
    "off": lambda x: F.dropout(x, 0.4, training=False),
    "channels last": lambda x: F.dropout(x.permute(0, 2, 3, 1), 0.4),
    "transposed": lambda x: F.dropout(x.transpose(2, 3), 0.4),
    "cropped": lambda x: F.dropout(x[:, :, 1:-1, 2:], 0.4),
    "flattened": lambda x: F.dropout(x.flatten(1), 0.4),
    "tokens": lambda x: F.dropout(x.flatten(2).transpose(1, 2), 0.4),
    "one channel, transposed": lambda x: F.dropout(x[:, :1].transpose(2, 3), 0.4),
    "one channel, for many": lambda x: F.dropout(x[:, :1].expand(-1, 3, -1, -1), 0.4),
    "of two samples": lambda x: F.dropout(x[1:3], 0.4),
    "of what is whole": lambda x: F.dropout(x.mean((2, 3)), 0.4),
    "one after the other": lambda x: F.dropout(F.dropout2d(F.dropout(x, 0.1), 0.2), 0.3),
}


@pytest.mark.parametrize("function", SHAPES.values(), ids=SHAPES)
def test_the_mask_is_that_of_one_rank(function):
    assert_parity(function, IMAGE, (2, 3))


@pytest.mark.parametrize("train", [True, False])
def test_dropout_layers(train):
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout(0.3, inplace=True), nn.MaxPool2d(2), nn.Dropout2d(0.3))
    assert_parity(net, IMAGE, (2, 2), train=train)
    assert_parity(nn.Dropout1d(0.5), (4, 3, 9), (3,), train=train)
    assert_parity(nn.Dropout3d(0.5), (4, 3, 3, 4, 5), (1, 2, 2), train=train)


@pytest.mark.parametrize("grid", [{"data": 2, "height": 2}, {"data": 3, "width": 2}], ids=str)
def test_micro_batches_and_tiles_have_their_parts_of_one_mask(grid):
    net = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.Dropout(0.5), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(60, 8), nn.Dropout(0.4)
    )
    assert_parity(net, IMAGE, grid)


LAYERS = [
    *(nn.Identity(), nn.AdaptiveAvgPool2d(4), nn.Upsample(scale_factor=2), nn.MaxPool2d(2)),
    *(nn.InstanceNorm2d(6, affine=True), nn.GroupNorm(2, 6), nn.LayerNorm([6, 7, 5]), nn.BatchNorm2d(6)),
    *(nn.AdaptiveMaxPool2d(4), nn.ChannelShuffle(2), nn.CircularPad2d(1)),
]


@pytest.mark.parametrize("layer", LAYERS)
def test_masks_of_channels_last_images(layer):
    x = numbers(IMAGE).contiguous(memory_format=torch.channels_last)
    net = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), layer, nn.Dropout(0.4)).double()
    assert_parity(net.to(memory_format=torch.channels_last), IMAGE, (2, 2), x=x)


def test_joined_channels_have_the_memory_format_of_one_rank():
    x = numbers(IMAGE).contiguous(memory_format=torch.channels_last)
    net = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3), nn.Dropout(0.4)).double()
    assert_parity(net.to(memory_format=torch.channels_last), IMAGE, {"width": 2}, mode="modelpar", x=x)
