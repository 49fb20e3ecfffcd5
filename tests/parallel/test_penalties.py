"""Gradients of parameters count once at any number of tiles, also those of penalties in the loss."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from math import prod

import pytest
import torch
from torch import Tensor, nn

import torchmn
from tests.parallel.training import tile_of
from tests.sharded.parity import assert_close, gradients_of, numbers
from torchmn import Communicator, ProcessGrid
from torchmn.geometry import Window, owned
from torchmn.parallel import full_state_dict, parallelize

IMAGE, STEPS, BATCH = (2, 16, 8), 6, 4


class Net(nn.Module):
    """Layers whose parameters meet tiles, one of them twice, and a parameter that is an output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.scale = nn.BatchNorm2d(3), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.again(torch.tanh(self.again(self.first(x) * self.scale))))
        return x.mean((2, 3)), self.scale


def l1(net: nn.Module, scale: Tensor) -> Tensor:
    return 0.03 * sum((p.abs().sum() for p in net.parameters()), torch.zeros(()))


Penalty = Callable[[nn.Module, Tensor], Tensor]
PENALTIES: dict[str, tuple[Penalty, bool, int]] = {  # penalty, in a separate backward, first step
    "none": (lambda net, scale: torch.zeros(()), False, 0),
    "of all parameters": (l1, False, 0),
    "of all parameters, in a separate backward": (l1, True, 0),
    "of all parameters, that begins late": (l1, False, STEPS - 1),
    "of an output that is a parameter": (lambda net, scale: scale.square(), False, 0),
}


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, penalty: Penalty, apart: bool, first: int
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        y, scale = net(x)
        loss, more = (y - 1).square().mean(), penalty(net, scale) * (step >= first)
        if apart:
            loss.backward()
            more.backward()
        else:
            (loss + more).backward()
        optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("sizes", [{"height": 2}, {"data": 2, "height": 2}], ids=str)
@pytest.mark.parametrize(("penalty", "apart", "first"), PENALTIES.values(), ids=PENALTIES)
def test_a_penalty_counts_once(penalty, apart, first, sizes):
    torch.manual_seed(0)
    net, x = Net().double(), numbers((BATCH, *IMAGE))
    alone = deepcopy(net)
    train(alone, sgd(alone), x, penalty, apart, first)

    def body(comm: Communicator) -> dict[str, Tensor]:
        grid = ProcessGrid(comm, **sizes)
        model = parallelize(net, grid, "halodatapar", input_shape=IMAGE)
        optimizer = torchmn.create_multi_node_optimizer(sgd(model), grid, model=model)
        mine = x[owned(BATCH, grid.sizes["data"], grid.place["data"]).as_slice()]
        train(model, optimizer, tile_of(mine, grid), penalty, apart, first)
        return full_state_dict(model)

    for state in torchmn.run_threads(body, prod(sizes.values())):
        for name, expected in alone.state_dict().items():
            assert_close(state[name].detach(), expected, name, 1e-10)


class Scaled(torchmn.nn.HaloLayer):
    windows = (Window(3, padding=(1, 1)), Window(3, padding=(1, 1)))

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def local(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, 3, 1) * self.weight


def test_a_halo_layer_uses_its_parameters_directly():
    net, x = nn.Sequential(Scaled(), nn.Conv2d(2, 1, 1)).double(), numbers((BATCH, *IMAGE))
    net(x).square().sum().backward()

    def body(comm: Communicator) -> Tensor:
        grid = ProcessGrid(comm, height=2)
        model = parallelize(net, grid, "halopar", input_shape=IMAGE)
        model(tile_of(x, grid)).square().sum().backward()
        return comm.allreduce(model[0].weight.grad, "mean")

    for gradient in torchmn.run_threads(body, 2):
        assert_close(gradient, net[0].weight.grad, "gradient", 1e-10)


@pytest.mark.parametrize("between", [nn.Tanh(), nn.ReLU()], ids=["one by one", "in a chain"])
@pytest.mark.parametrize("rows", [9, 32], ids=["halos", "wide halos"])
def test_a_backward_whose_graph_is_kept_has_the_same_gradients(rows, between):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), between, nn.Conv2d(3, 2, 3, padding=1)).double()
    x = numbers((BATCH, 2, rows, 6))
    net(x).pow(3).sum().backward(create_graph=True)

    def body(comm: Communicator) -> dict[str, Tensor | None]:
        grid = ProcessGrid(comm, height=2)
        model = parallelize(nn.Sequential(net), grid, "halopar", input_shape=x.shape[1:])
        model(tile_of(x, grid)).pow(3).sum().backward(create_graph=True)
        return {name: None if g is None else g.detach() for name, g in gradients_of(model, comm, grid).items()}

    for gradients in torchmn.run_threads(body, 2):
        for name, p in net.named_parameters():
            assert p.grad is not None
            assert_close(gradients[f"0.{name}"], p.grad.detach(), name, 1e-10)
