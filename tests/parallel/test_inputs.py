"""What a model under halopar takes: tiles or whole images, and never the one for the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchmn
from tests.nn.parts.parity import assert_close, numbers
from tests.parallel.training import tile_of
from torchmn.communicators.process_grid import ProcessGrid
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
        model(torch.zeros(IMAGE, dtype=torch.float64))  # nothing can be said of an empty image

    torchmn.run_threads(body, 2)


def test_tiles_that_do_not_fit_together_are_an_error_on_every_rank():
    def body(comm):
        model = parallelize(layer(), ProcessGrid(comm, height=2), "halopar")
        with pytest.raises(ParallelizeError, match="the ranks' tiles have shapes"):
            model(numbers((2, 3, 3 + 2 * comm.rank, 6), comm.rank))

    torchmn.run_threads(body, 2)
