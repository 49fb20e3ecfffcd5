"""One rank that does something else: an error on every rank before any communication, and no hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmn
from tests.parallel.training import tile_of
from tests.sharded.parity import numbers
from torchmn import ProcessGrid
from torchmn.errors import MismatchError, ParallelizeError
from torchmn.parallel import parallelize

IMAGES = numbers((2, 1, 8, 8))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4 * 64, 3)

    def forward(self, x: Tensor, deeper: bool = True) -> Tensor:
        x = self.first(x)
        x = self.second(x).relu() if deeper else x
        return self.last(x.flatten(1))


def freeze(model: Any, x: Tensor) -> Tensor:
    model.first.requires_grad_(False)
    return model(x)


def freeze_last_bias(model: Any, x: Tensor) -> Tensor:
    model.last.bias.requires_grad_(False)
    return model(x)


def cast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def infer(model: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(x)


ODD: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "an input that learns": ("whole inputs", lambda model, x: model(x.requires_grad_())),
    "another dtype": ("whole inputs", lambda model, x: model.float()(x.float())),
    "no input": ("whole inputs", lambda model, x: model(None)),
    "another batch": ("whole inputs", lambda model, x: model(x[:1])),
    "another flag": ("other arguments", lambda model, x: model(x, False)),
    "frozen layer": (r"frozen parameters \('first.weight', 'first.bias'\)", freeze),
    "frozen bias": (r"frozen parameters \('last.bias',\)", freeze_last_bias),
    "autocast": ("autocast torch.bfloat16", cast),
    "inference mode": ("gradients inference mode", infer),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("mode", ["halopar", "modelpar"])
def test_a_difference_on_one_rank_is_an_error_on_every_rank(mode, odd):
    net, (message, act) = Net().double(), odd

    def body(comm):
        grid = ProcessGrid(comm, height=2)
        model = parallelize(net, grid, mode, input_shape=(1, 8, 8))
        x = tile_of(IMAGES, grid) if mode == "halopar" else IMAGES.clone()
        with pytest.raises(MismatchError, match=message):
            act(model, x) if comm.rank else model(x, True) if "flag" in message else model(x)

    torchmn.run_threads(body, 2, timeout=30)


def test_a_dry_run_that_fails_on_one_rank_is_an_error_on_every_rank():
    net = Net().double()

    def fail(*_: Any) -> None:
        raise ValueError("too hot here")

    def body(comm):
        grid = ProcessGrid(comm, height=2)
        model: Any = parallelize(net, grid, "halopar", input_shape=(1, 8, 8))
        if comm.rank:
            model.second.register_forward_hook(fail)
        with pytest.raises(ParallelizeError, match="too hot here"):
            model(tile_of(IMAGES, grid))

    torchmn.run_threads(body, 2, timeout=30)
