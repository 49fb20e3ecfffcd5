"""Elementwise functions: activations, and arithmetic with sharded tensors, scalars, whole tensors and parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sharded.parity import assert_parity

IMAGE = (2, 4, 7, 5)

ACTIVATIONS: list[nn.Module] = [
    *(kind() for kind in (nn.ReLU, nn.ReLU6, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish)),
    *(kind() for kind in (nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink)),
    *(kind() for kind in (nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Softmax2d, nn.Identity)),
    *(nn.GELU("tanh"), nn.Threshold(0.1, 2.0), nn.PReLU(), nn.PReLU(4), nn.GLU(1)),
    *(nn.Softmax(1), nn.LogSoftmax(-3), nn.Softmin(1)),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation_equals_one_rank(activation):
    assert_parity(activation, IMAGE, (2, 2))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ELU, nn.SiLU, nn.Hardtanh, nn.LeakyReLU, nn.Hardswish])
def test_activations_in_place(activation):
    assert_parity(nn.Sequential(nn.Conv2d(4, 4, 1), activation(inplace=True)), IMAGE, (2, 2))


def test_a_randomized_relu_in_eval_mode():
    assert_parity(nn.RReLU(), IMAGE, (2, 2), train=False)


def ramp(x: Tensor, *shape: int) -> Tensor:
    """1, 2, 3, ... as a whole tensor."""
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=x.dtype, device=x.device).view(shape)


def accumulated(x: Tensor) -> Tensor:
    y = x * 1
    y += 1
    y *= x
    y -= ramp(x, 7, 5)
    y /= 3
    return y


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers on the left": lambda x: 2 - x + 1 / (x * x + 1) + 2**x,
    "residual": lambda x: x + F.relu(x),
    "keywords": lambda x: torch.add(input=x, other=x, alpha=3) + torch.mul(x, other=x),
    "where": lambda x: torch.where(x > 0, x, x * 0.1) + torch.where(x > 0, x, 0.0),
    "masked": lambda x: x.masked_fill(x > 0.5, 1.0).clamp(-0.5, max=0.7),
    "three operands": lambda x: torch.addcmul(x, x, x * 2, value=2) + torch.lerp(x, x * 2, 0.3),
    "larger of two": lambda x: torch.max(x, x * 2) + torch.minimum(x, -x) + torch.min(x, other=x * 3),
    "in place": accumulated,
    "in place, chained": lambda x: (x * 1).add_(1).mul_(2).sub_(x).sigmoid_(),
    "in place, broadcast": lambda x: (x * 1).add_(x.mean(1, keepdim=True)),
    "a whole map": lambda x: x + ramp(x, 7, 5),
    "a whole row, a whole column": lambda x: x * ramp(x, 5) + ramp(x, 7, 1) * x,
    "a whole batch": lambda x: x * ramp(x, 2, 4, 7, 5),
    "a 0-d tensor": lambda x: x * torch.tensor(2.0, dtype=x.dtype, device=x.device),
    "a whole tensor of more dims": lambda x: x * ramp(x, 3, 1, 1, 1, 5),
    "a new tensor": lambda x: x * x.new_ones(x.shape) + torch.full_like(x, 2) + x.new_zeros(1),
    "squeeze and excitation": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "excitation by index": lambda x: torch.sigmoid(x.mean((2, 3)))[:, :, None, None] * x,
    "excitation expanded": lambda x: x * F.adaptive_avg_pool2d(x, 1).flatten(1).view(2, 4, 1, 1).expand_as(x),
    "a pooled map of one pixel": lambda x: x * F.avg_pool2d(x, (7, 5)),
    "a pooled row": lambda x: x - F.max_pool2d(x, (7, 1)),
    "the shape in arithmetic": lambda x: x / (x.shape[2] * x.size(-1)) + len(x) + x.numel() + x.ndim,
    "detached": lambda x: x.detach() * x + x.clone(),
    "another dtype and back": lambda x: x.to(torch.complex128).real * x.type_as(x),
    "comparisons": lambda x: (x > 0).double() * x + (x == x).to(x.dtype) + (~(x < 0)).double(),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_arithmetic_equals_one_rank(function):
    assert_parity(function, IMAGE, (2, 3))


class Positions(nn.Module):
    """A parameter of the shape of the whole image, one per row, and one for all, used with parts and alone."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.row = nn.Parameter(torch.rand(4, 7, 5)), nn.Parameter(torch.rand(7, 1))
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x * self.map + self.row) + self.gain.square()


@pytest.mark.parametrize("grid", [(2, 2), (3, 3), {"data": 2, "width": 2}], ids=str)
def test_learned_maps_get_the_gradient_of_one_rank(grid):
    assert_parity(Positions(), IMAGE, grid)


class Excitation(nn.Module):
    """Squeeze and excitation with layers between: whole values that come from parts and go to parts."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.conv = nn.Linear(4, 3), nn.Linear(3, 4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        gates = torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3))))))
        return y * gates.view(*gates.shape, 1, 1) + x


@pytest.mark.parametrize("grid", [(2, 2), (3, 2)], ids=str)
def test_squeeze_and_excitation_with_layers(grid):
    assert_parity(Excitation(), IMAGE, grid)
