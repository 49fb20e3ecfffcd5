"""A forward that takes another path later: right gradients, or an error."""

from __future__ import annotations

from copy import deepcopy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmn
from tests.parallel.training import tile_of
from tests.sharded.parity import assert_close, gradients_of, numbers
from torchmn import ProcessGrid
from torchmn.errors import ArgumentError, ParallelizeError
from torchmn.geometry import Window
from torchmn.parallel import parallelize

IMAGES = numbers((2, 1, 8, 8))


class Growing(nn.Module):
    """One more convolution, and one more norm, if asked: by an argument, or by an attribute."""

    def __init__(self, more: nn.Module) -> None:
        super().__init__()
        self.first, self.more, self.last = nn.Conv2d(1, 3, 3, padding=1), more, nn.Linear(3, 2)
        self.grown = False

    def forward(self, x: Tensor, grown: bool = False) -> Tensor:
        x = self.first(x)
        if grown or self.grown:
            x = self.more(x)
        return self.last(x.mean((2, 3)))


@pytest.mark.parametrize("how", ["argument", "attribute"])
@pytest.mark.parametrize("mode", ["halopar", "modelpar"])
def test_parameters_that_a_later_path_uses_have_the_serial_gradient(mode, how):
    net = Growing(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.PReLU())).double()
    serial = deepcopy(net)
    serial(IMAGES, True).square().sum().backward()
    expected = {name: p.grad for name, p in serial.named_parameters()}

    def body(comm):
        grid = ProcessGrid(comm, height=2)
        model: Any = parallelize(net, grid, mode, input_shape=(1, 8, 8))
        x = tile_of(IMAGES, grid) if mode == "halopar" else IMAGES
        model(x).square().sum().backward()
        model.grown = how == "attribute"
        for _ in range(2):
            model.zero_grad()
            (model(x, True) if how == "argument" else model(x)).square().sum().backward()
            for name, got in gradients_of(model, comm, grid).items():
                assert_close(got, expected[name], name, 1e-10)

    torchmn.run_threads(body, 2, timeout=30)


class Doubled(torchmn.nn.HaloLayer):
    windows = (Window(3, padding=(1, 1)), Window(3, padding=(1, 1)))

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def local(self, x: Tensor) -> Tensor:
        return x[..., 1:-1, 1:-1] * self.factor


def test_a_halo_layer_that_only_a_later_path_uses_is_refused():
    net = Growing(Doubled()).double()

    def body(comm):
        grid = ProcessGrid(comm, height=2)
        model: Any = parallelize(net, grid, "halopar", input_shape=(1, 8, 8))
        model(tile_of(IMAGES, grid))
        model.grown = True
        with pytest.raises(ParallelizeError, match="Run Doubled in the first forward too"):
            model(tile_of(IMAGES, grid))

    torchmn.run_threads(body, 2, timeout=30)


def test_a_forward_that_was_put_on_the_object_is_refused():
    net = Growing(nn.Identity())
    net.forward = MethodType(lambda self, x: self.last(self.first(x).mean((2, 3))) * 100, net)

    def body(comm):
        with pytest.raises(ArgumentError, match=r"Growing\.forward was replaced on this object"):
            parallelize(net, comm, "halopar")

    torchmn.run_threads(body, 2, timeout=30)


def test_a_compiled_layer_is_refused_where_it_would_be_cut():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), torch.compile(nn.Conv2d(2, 2, 3)))

    def body(comm):
        for mode in ("halopar", "modelpar"):
            with pytest.raises(ArgumentError, match="1 is compiled"):
                parallelize(net, comm, mode)

    torchmn.run_threads(body, 2, timeout=30)
