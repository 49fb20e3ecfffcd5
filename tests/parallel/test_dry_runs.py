"""How often a model is run on meta tensors, with the numbers of one rank for all shapes."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import torchmn
from tests._worlds.agreements import recorded_agreements
from tests.parallel.training import tile_of
from tests.sharded.parity import assert_close, gradients_of, numbers
from torchmn import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.parallel import parallelize

DRY_RUN = "dry run of a parallel model"


class OnePath(nn.Module):
    """Reads no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())
        self.more, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).mean((2, 3)))


class TwoPaths(OnePath):
    """Large batches and large images pass through one more layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if len(x) > 4 or x.shape[2] > 20:
            x = self.more(x)
        return self.last(x.mean((2, 3)))


class ShiftRows(torch.autograd.Function):
    """A function whose backward is wrong for a shard."""

    @staticmethod
    def forward(ctx, x):
        return x.roll(1, 2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.roll(-1, 2)


class ShiftsLargeBatches(OnePath):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(ShiftRows.apply(x) if x.size(0) > 4 else x)


def dry_runs(net: nn.Module, shapes: list[tuple[int, int, int]]) -> list[int]:
    """Returns how many of two ranks made a dry run at each shape, after comparing outputs and gradients."""
    net = net.double()

    def body(comm: torchmn.Communicator) -> list[int]:
        grid = ProcessGrid(comm, height=2)
        model, counts = parallelize(net, grid, "halopar"), []
        for batch, height, width in shapes:
            x, serial = numbers((batch, 1, height, width)), deepcopy(net)
            expected = serial(x)
            expected.square().sum().backward()
            model.zero_grad()
            comm.barrier()
            before = names.count(DRY_RUN)
            comm.barrier()
            result = model(tile_of(x, grid))
            comm.barrier()
            counts.append(names.count(DRY_RUN) - before)
            assert_close(result, expected, f"{x.shape}", 1e-10)
            result.square().sum().backward()
            found = gradients_of(model, comm, grid)
            for name, p in serial.named_parameters():
                got, gradient = found[name], p.grad
                assert (got is None) == (gradient is None)
                if got is not None and gradient is not None:
                    assert_close(got, gradient, f"{name}, {x.shape}", 1e-10)
        return counts

    with recorded_agreements() as names:
        return torchmn.run_threads(body, 2, timeout=60)[0]


def test_another_number_of_samples_needs_no_dry_run():
    shapes = [(3, 16, 8), (2, 16, 8), (4, 16, 8), (6, 16, 8), (1, 16, 8), (1, 16, 8)]
    assert dry_runs(OnePath(), shapes) == [2, 0, 0, 0, 2, 0]


def test_images_of_up_to_twice_the_size_need_no_dry_run():
    shapes = [(2, 16, 8), (2, 18, 8), (2, 32, 16), (2, 34, 16), (2, 14, 16), (2, 15, 31), (3, 30, 14)]
    assert dry_runs(OnePath(), shapes) == [2, 0, 0, 2, 2, 0, 0]


def test_a_forward_that_reads_a_shape_has_a_dry_run_for_each():
    shapes = [(2, 16, 8), (6, 16, 8), (2, 24, 8), (6, 16, 8), (3, 16, 8), (2, 16, 8)]
    assert dry_runs(TwoPaths(), shapes) == [2, 2, 2, 0, 2, 0]


@pytest.mark.guard("CustomAutograd")
def test_guards_see_a_path_that_only_large_batches_take():
    with pytest.raises(ParallelizeError, match="ShiftRows"):
        dry_runs(ShiftsLargeBatches(), [(2, 16, 8), (6, 16, 8)])
