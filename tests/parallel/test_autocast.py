"""Autocast to bfloat16 in every mode: dtype and precision of one rank."""

from __future__ import annotations

from copy import deepcopy
from math import prod

import pytest
import torch
from torch import Tensor, nn

import torchmn
from tests.parallel.training import tile_of
from tests.sharded.parity import gradients_of, numbers
from torchmn import ProcessGrid
from torchmn.geometry import owned
from torchmn.parallel import parallelize

PLACES = [
    ("halopar", {"height": 2, "width": 2}),
    ("modelpar", {"width": 2}),
    ("datapar", {"data": 2}),
    ("halodatapar", {"data": 2, "height": 2}),
]
NETS = {
    "classes": lambda: nn.Sequential(
        *(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1)),
        *(nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 64, 16), nn.ReLU(), nn.Linear(16, 5)),
    ),
    "pixels": lambda: nn.Sequential(
        *(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 3, 2, 2)),
    ),
    "padded": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReflectionPad2d(2)),  # in float32, as torch casts it
}


def distance(x: Tensor, exact: Tensor) -> float:
    return float((x.float() - exact).norm() / exact.norm().clamp_min(1e-6))


def forward(model: nn.Module, x: Tensor, cast: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        y = model(x)
    y.float().square().mean().backward()
    return y.detach()


@pytest.mark.parametrize(("mode", "sizes"), PLACES, ids=str)
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_autocast_gives_the_dtype_and_the_precision_of_one_rank(make, mode, sizes):
    torch.manual_seed(0)
    net, x = make(), numbers((4, 2, 16, 16), dtype=torch.float32)
    casted, exact = deepcopy(net), deepcopy(net)
    theirs, right = forward(casted, x, True), forward(exact, x, False)

    def body(comm):
        grid = ProcessGrid(comm, **sizes)
        model = parallelize(net, grid, mode, input_shape=(2, 16, 16))
        mine = x[owned(4, grid.sizes["data"], grid.place["data"]).as_slice()]
        y = forward(model, tile_of(mine, grid) if mode.startswith("halo") else mine, True)
        assert y.dtype == theirs.dtype
        assert distance(torch.cat(grid.replicas.allgather(y)), right) < 2 * distance(theirs, right) + 2e-3
        for name, gradient in gradients_of(model, comm, grid).items():
            of_one, of_float = casted.get_parameter(name).grad, exact.get_parameter(name).grad
            assert gradient is not None and of_one is not None and of_float is not None
            if of_float.norm() > 1e-5:  # batch norm leaves nothing but rounding of a bias before it
                mean = gradient / grid.sizes["data"]
                assert distance(mean, of_float) < 2 * distance(of_one, of_float) + 5e-3, name

    torchmn.run_threads(body, prod(sizes.values()), timeout=60)
