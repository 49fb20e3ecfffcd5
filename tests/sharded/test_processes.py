"""Some layers on ranks that are processes: the same results as on threads."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from tests._worlds import ranks
from tests.sharded.parity import assert_same, numbers, run_on_grid, run_serially, sizes_of

GRIDS = {2: (2, 1), 3: (1, 3), 4: (2, 2)}
IMAGE = (2, 3, 11, 9)


def stack() -> nn.Module:
    """Wide halos, uneven tiles, statistics, masks, a pool that stays cut, an image that becomes a vector."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, stride=2, padding=2, padding_mode="reflect"),
        nn.BatchNorm2d(6),
        nn.PReLU(),
        nn.MaxPool2d(3, 1, 1),
        nn.Dropout(0.3),
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Upsample(scale_factor=1.5, mode="bilinear"),
        nn.Dropout2d(0.2),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.Tanh(),
        nn.Linear(12, 5),
    )


@ranks(2, 3, 4, on="mpi")
@ranks(2, on="gloo")
def test_layers_on_processes_equal_one_process(comm):
    torch.manual_seed(0)
    net = stack().double()
    for train in (True, False):
        net.train(train)
        torch.manual_seed(5)
        expected = run_serially(deepcopy(net), numbers(IMAGE))
        torch.manual_seed(5)  # every process with the same seed: so masks are those of one
        got = run_on_grid(comm, net, numbers(IMAGE), sizes_of(GRIDS[comm.size]), "halopar")
        assert_same(got, expected, f"rank {comm.rank} of {comm.size}", 1e-10)


@ranks(4, on="mpi")
def test_tiles_and_micro_batches_on_processes_equal_one_process(comm):
    torch.manual_seed(0)
    net, x = stack().double(), numbers((5, *IMAGE[1:]))
    torch.manual_seed(5)
    expected = run_serially(deepcopy(net), x)
    torch.manual_seed(5)
    got = run_on_grid(comm, net, x, {"data": 2, "height": 2}, "halodatapar")
    assert_same(got, expected, f"rank {comm.rank} of {comm.size}", 1e-10)
