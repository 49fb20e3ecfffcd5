"""Ranks that share images but not the order of their samples: found in the first backward, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import torchmn
from tests.nn.parts.parity import numbers
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.data import scatter_regions
from torchmn.errors import MismatchError
from torchmn.parallel import parallelize

IMAGES, LABELS = numbers((12, 1, 8, 8), dtype=torch.float32), torch.arange(12) % 3


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 3))


@pytest.mark.parametrize("seeds", [(5, 5), (5, 6)], ids=["one seed", "a seed of its own"])
def test_tiles_that_each_rank_shuffles_for_itself(seeds):
    plain = net()

    def body(comm):
        grid = ProcessGrid(comm, height=2)
        model = parallelize(plain, grid, "halopar", input_shape=(1, 8, 8))
        tiles = scatter_regions((IMAGES, LABELS), grid)
        order = torch.Generator().manual_seed(seeds[comm.rank])
        x, t = next(iter(DataLoader(tiles, 6, shuffle=True, generator=order)))
        loss = F.cross_entropy(model(x), t)
        if seeds[0] == seeds[1]:
            loss.backward()
            return
        with pytest.raises(MismatchError, match="a generator with the same seed"):
            loss.backward()

    torchmn.run_threads(body, 2, timeout=30)


def test_labels_in_another_order_under_modelpar():
    plain = net()

    def body(comm):
        model = parallelize(plain, comm, "modelpar", input_shape=(1, 8, 8))
        loss = F.cross_entropy(model(IMAGES), LABELS.flip(0) if comm.rank else LABELS)
        with pytest.raises(MismatchError, match="their losses or their labels differ"):
            loss.backward()

    torchmn.run_threads(body, 2, timeout=30)


def test_later_steps_pay_nothing():
    plain = net()

    def body(comm):
        model = parallelize(plain, comm, "modelpar", input_shape=(1, 8, 8))
        for _ in range(5):
            y = model(IMAGES)
        assert not y._backward_hooks

    torchmn.run_threads(body, 2, timeout=30)
