"""ConvnetDist, GBDist and MLPDist: the published sizes on ranks, with the numbers of one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import torchmn
from tests._worlds import ranks
from torchmn import ProcessGrid
from torchmn.models import CIFAR10, ConvnetDist, GBDist, MLPDist, SparseAutoencoder, convnet, mlp
from torchmn.parallel import full_state_dict


def check(parallel: nn.Module, plain: nn.Module, x: torch.Tensor, most_of_all: float) -> None:
    """The same logits as `plain` with the same weights, and no rank with more than a share of the parameters."""
    assert type(parallel) is type(plain)
    state = full_state_dict(parallel)
    plain.load_state_dict(state)
    assert_close(parallel.double()(x), plain.double()(x))
    mine = sum(p.numel() for p in parallel.parameters())
    assert mine < most_of_all * sum(p.numel() for p in plain.parameters())


def images(*shape: int) -> torch.Tensor:
    """Numbers that are the same on every rank, also where ranks are threads."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@ranks(2, 3, on="threads")
def test_convnet(comm):
    # The convolutions, 25,570 of 431,080 parameters, are on every rank; the Linears are cut.
    check(ConvnetDist(comm), convnet(), images(3, 1, 28, 28), 0.6)


@ranks(2, on="threads")
def test_convnet_for_images_of_another_size(comm):
    grid = ProcessGrid(comm, height=2)
    parallel = ConvnetDist(grid, in_shape=(3, 20, 24), maps=(4,), kernel=3, hidden=(), classes=5)
    check(parallel, convnet((3, 20, 24), (4,), 3, (), 5), images(2, 3, 20, 24), 0.7)


@ranks(4, on="threads")
def test_gb(comm):
    parallel = GBDist(comm)
    check(parallel, SparseAutoencoder(), images(3, 1, 28, 28), 0.3)
    changed = GBDist(ProcessGrid(comm, data=2, width=2), "halodatapar", configuration=CIFAR10, maps=2)
    assert changed.in_shape == (3, 32, 32) and changed.stacks[0].filter.out_maps == 2


@ranks(3, on="threads")
def test_mlp(comm):
    check(MLPDist(comm), mlp(), images(3, 784), 0.4)
    assert MLPDist(comm, "datapar", sizes=(20, 10)).parallelism.mode == "datapar"


@ranks(1, on="threads")
def test_one_rank_is_a_grid_too(comm):
    assert GBDist(comm)(images(2, 1, 28, 28).float()).shape == (2, 10)


def test_the_published_sizes():
    assert [tuple(p.shape) for p in convnet().parameters() if p.dim() > 1] == [
        (20, 1, 5, 5),
        (50, 20, 5, 5),
        (500, 800),
        (10, 500),
    ]
    assert [tuple(p.shape) for p in mlp().parameters() if p.dim() > 1] == [(2000, 784), (10, 2000)]


@ranks(1, on="threads")
def test_a_mode_that_does_not_exist_is_named(comm):
    with pytest.raises(torchmn.TorchMNError, match="halopar"):
        MLPDist(comm, "halpar")
