"""Vectors and channels that are cut over ranks: functions between layers give the numbers of one rank."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sharded.parity import assert_parity

GRIDS = [{"width": 2}, {"width": 3}, {"data": 2, "width": 2}]


class Between(nn.Module):
    """Two Linears, and something between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.between, self.last = nn.Linear(6, 9), function, nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


def ramp(x: Tensor) -> Tensor:
    return torch.arange(9.0, dtype=x.dtype, device=x.device)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": lambda x: F.gelu(x) * x + 1,
    "softmax": lambda x: x.softmax(-1),
    "layer norm": nn.LayerNorm(9),
    "batch norm": nn.BatchNorm1d(9),
    "group norm": nn.GroupNorm(3, 9),
    "dropout": nn.Dropout(0.4),
    "prelu": nn.PReLU(9),
    "a whole vector": lambda x: x * ramp(x) + ramp(x),
    "in place": lambda x: F.relu((x * 1).add_(1), inplace=True),
    "mean, maximum": lambda x: x - x.mean(1, keepdim=True) + x.max(1, keepdim=True)[0] * x.std(1, keepdim=True),
    "slices": lambda x: torch.cat([x[:, 3:], x[:, :3]], 1) + x[:, :1],
    "chunks": lambda x: torch.cat(x.chunk(3, 1)[::-1], 1),
    "another shape": lambda x: x.view(-1, 3, 3).transpose(1, 2).reshape(-1, 9),
    "product": lambda x: x @ torch.diag(ramp(x)) + torch.einsum("bi,ij->bj", x, torch.diag(ramp(x))),
    "sorted, rolled": lambda x: x.sort(1)[0] + x.roll(1, 1) + x.flip(1) + x.cumsum(1),
    "padded": lambda x: F.pad(x, (1, 0))[:, 1:],
    "normalised": lambda x: F.normalize(x) + torch.logsumexp(x, 1, keepdim=True),
}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_between_two_linears(function, grid):
    assert_parity(Between(function), (5, 6), grid, mode="modelpar")


@pytest.mark.parametrize("name", ["relu", "softmax", "layer norm", "dropout", "a whole vector"])
def test_between_two_linears_over_sequences(name):
    assert_parity(Between(FUNCTIONS[name]), (4, 3, 6), {"width": 2}, mode="modelpar")


NETS = {
    "pools": [nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.MaxPool2d(2), nn.Conv2d(7, 5, 3), nn.Dropout(0.3)],
    "groups": [nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=3), nn.GroupNorm(2, 6), nn.AdaptiveAvgPool2d(2)],
    "upwards": [nn.Conv2d(3, 6, 3), nn.ConvTranspose2d(6, 4, 2, 2), nn.InstanceNorm2d(4), nn.PixelShuffle(2)],
    "tracked": [nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.MaxPool2d(2)],
    "over channels": [nn.Conv2d(3, 6, 3), nn.Softmax(1), nn.Dropout2d(0.4), nn.LocalResponseNorm(3), nn.PReLU(6)],
}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("layers", NETS.values(), ids=NETS)
def test_convolutions_cut_by_channels(layers, grid):
    net = nn.Sequential(*layers).double()
    features = deepcopy(net)(torch.zeros(2, 3, 10, 8, dtype=torch.float64)).flatten(1).shape[1]
    assert_parity(nn.Sequential(net, nn.Flatten(), nn.Linear(features, 4)), (5, 3, 10, 8), grid, mode="modelpar")


def test_a_model_that_is_one_layer():
    assert_parity(nn.Linear(6, 4), (5, 6), {"width": 2}, mode="modelpar")
    assert_parity(nn.Conv2d(3, 4, 3), (2, 3, 8, 8), {"width": 2}, mode="modelpar")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_attention_between_cut_vectors(grid, batch_first):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 10, dropout=0.0, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(self.encoder(x) if batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1))

    assert_parity(Words(), (4, 5, 6), grid, mode="modelpar")
