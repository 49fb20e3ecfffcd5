"""Ranks that share images but shuffle differently: an error in the first backward, on all of these ranks."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from tests._worlds import ranks
from tests.sharded.parity import numbers
from torchmn import ProcessGrid
from torchmn.data import scatter_regions
from torchmn.errors import MismatchError
from torchmn.parallel import parallelize

IMAGES, LABELS = numbers((12, 1, 8, 8), dtype=torch.float32), torch.arange(12) % 3


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 3))


# 8 x 8 images: three ranks along a dim hold 3, 3 and 2 rows; 3 x 2 and 2 x 3 tiles have sides of 2 to 4.
GRIDS = [{}, {"height": 2}, {"width": 3}, {"height": 2, "width": 2}, {"height": 3, "width": 2}]
SPLIT_SAMPLES = [{"data": 2, "height": 2}, {"data": 2, "width": 3}]


def run_on(sizes, body):
    return torchmn.run_threads(body, prod(sizes.values()), timeout=30)


def loss_of_tiles(comm, plain, sizes, seed_of):
    """The loss of this rank's tiles of a batch that it drew with its own seed."""
    grid = ProcessGrid(comm, **sizes)
    mode = "halodatapar" if "data" in sizes else "halopar"
    model = parallelize(plain, grid, mode, input_shape=(1, 8, 8))
    order = torch.Generator().manual_seed(seed_of(grid))
    tiles = scatter_regions((IMAGES, LABELS), grid, replicated=True)
    x, t = next(iter(DataLoader(tiles, 6, shuffle=True, generator=order)))
    return F.cross_entropy(model(x), t)


def losses_of_tiles(plain, sizes, seed_of) -> list[float]:
    """Every rank's loss, after its backward."""

    def body(comm) -> float:
        loss = loss_of_tiles(comm, plain, sizes, seed_of)
        loss.backward()
        return loss.item()

    return run_on(sizes, body)


def serial_loss(plain, seed: int) -> float:
    """The loss of the whole images of a batch that is drawn with that seed."""
    order = torch.Generator().manual_seed(seed)
    x, t = next(iter(DataLoader(TensorDataset(IMAGES, LABELS), 6, shuffle=True, generator=order)))
    return F.cross_entropy(plain(x), t).item()


@pytest.mark.parametrize("sizes", [*GRIDS, *SPLIT_SAMPLES], ids=str)
def test_tiles_that_all_ranks_shuffle_with_one_seed(sizes):
    plain = net()
    losses = losses_of_tiles(plain, sizes, lambda _: 5)
    assert losses == pytest.approx([serial_loss(plain, 5)] * len(losses), rel=1e-5)


@pytest.mark.parametrize("sizes", SPLIT_SAMPLES, ids=str)
def test_groups_of_ranks_with_different_samples_may_shuffle_differently(sizes):
    plain = net()
    losses = losses_of_tiles(plain, sizes, lambda grid: grid.place["data"])
    tiles = len(losses) // 2
    assert losses == pytest.approx([serial_loss(plain, 0)] * tiles + [serial_loss(plain, 1)] * tiles, rel=1e-5)


@pytest.mark.guard("different_losses")
@pytest.mark.parametrize("sizes", [*GRIDS[1:], *SPLIT_SAMPLES], ids=str)
def test_tiles_that_the_last_rank_shuffles_differently(sizes):
    plain = net()

    def body(comm):
        loss = loss_of_tiles(comm, plain, sizes, lambda _: 5 + (comm.rank == comm.size - 1))
        tiles = comm.size // sizes.get("data", 1)  # the ranks that share images: only they must agree
        if comm.rank < comm.size - tiles:
            loss.backward()
            return
        with pytest.raises(MismatchError, match="a generator with the same seed"):
            loss.backward()

    run_on(sizes, body)


@pytest.mark.guard("different_losses")
@ranks(2, 3, 4, on="threads")
def test_labels_in_another_order_under_modelpar(comm):
    model = parallelize(net(), comm, "modelpar", input_shape=(1, 8, 8))
    loss = F.cross_entropy(model(IMAGES), LABELS.flip(0) if comm.rank == comm.size - 1 else LABELS)
    with pytest.raises(MismatchError, match="their losses or their labels differ"):
        loss.backward()


@ranks(1, 2, 3, on="threads")
def test_later_steps_compare_nothing(comm):
    model = parallelize(net(), comm, "modelpar", input_shape=(1, 8, 8))
    for _ in range(5):
        y = model(IMAGES)
    assert not y._backward_hooks
