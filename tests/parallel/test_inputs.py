"""Inputs under halopar: tiles or whole images, never one taken for the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchmn
from tests.parallel.training import tile_of
from tests.sharded.parity import assert_close, numbers
from torchmn import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.parallel import parallelize

IMAGE = (2, 3, 8, 6)


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3, padding=1).double()


def test_whole_images_and_tiles_give_the_same():
    net, x = layer(), numbers(IMAGE)

    def body(comm):
        grid = ProcessGrid(comm, height=2, width=2)
        model = parallelize(net, grid, "halopar", input_shape=IMAGE[1:])
        return model(x), model(tile_of(x, grid)), parallelize(net, grid, "halopar")(tile_of(x, grid))

    for outputs in torchmn.run_threads(body, 4):
        for got in outputs:
            assert_close(got.detach(), net(x).detach(), "output", 1e-12)


def test_the_same_image_on_all_ranks_is_not_taken_for_tiles():
    def body(comm):
        model = parallelize(layer(), ProcessGrid(comm, height=2), "halopar")
        with pytest.raises(ParallelizeError, match=r"input_shape=\(3, 8, 6\)"):
            model(numbers(IMAGE))
        model(torch.zeros(IMAGE, dtype=torch.float64))  # the check does not apply to constant images

    torchmn.run_threads(body, 2)


def test_tiles_that_do_not_fit_together_are_an_error_on_every_rank():
    def body(comm):
        model = parallelize(layer(), ProcessGrid(comm, height=2), "halopar")
        with pytest.raises(ParallelizeError, match="the ranks' tiles have shapes"):
            model(numbers((2, 3, 3 + 2 * comm.rank, 6), comm.rank))

    torchmn.run_threads(body, 2)


class TwoHeads(nn.Module):
    """An auxiliary head in training only, another one in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.auxiliary = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.evaluating = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.trunk(x)
        return y.mean((1, 2, 3)) + (self.auxiliary if self.training else self.evaluating)(y).mean((1, 2, 3))


@pytest.mark.parametrize("first", [True, False], ids=["training first", "evaluation first"])
def test_parameters_that_only_training_uses(first):
    torch.manual_seed(0)
    net, x = TwoHeads().double(), numbers(IMAGE)
    expected = {}
    for train in (True, False):
        net.train(train).zero_grad()
        net(x).sum().backward()
        expected[train] = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()

    def body(comm):
        model = parallelize(net.train(first), ProcessGrid(comm, height=2), "halopar", input_shape=IMAGE[1:])
        for train in (first, not first, first):
            model.train(train).zero_grad()
            model(x).sum().backward()
            for name, p in model.named_parameters():
                assert (p.grad is None) == (name not in expected[train])
                if p.grad is not None:
                    assert_close(comm.allreduce(p.grad, "mean"), expected[train][name], name, 1e-10)

    torchmn.run_threads(body, 2)
