"""Parameters that change between forward and backward: an error as on one rank, or the gradients of that forward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import filled
from torchmn import Communicator

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "strided": lambda: nn.Conv2d(4, 4, 3, stride=2),
    "reflecting": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 3),
    "transposed and strided": lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1),
    "norm": lambda: nn.BatchNorm2d(4),
    "groups": lambda: nn.GroupNorm(2, 4),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4 * 8 * 6, 6), nn.Tanh(), nn.Linear(6, 3)),
}


def image() -> Tensor:
    return torch.arange(2 * 4 * 8 * 6, dtype=torch.float64).view(2, 4, 8, 6).sin()


def gradient(model: nn.Module, change: bool) -> Tensor | None:
    """The gradient of the input; None if torch refuses it because the second layer's parameters were changed."""
    x = image().requires_grad_()
    result = model(x)
    if change:
        with torch.no_grad():
            for parameter in model[1].parameters():
                parameter.mul_(1.5)
    try:
        (result**2).sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None
    return x.grad


@pytest.mark.parametrize("mode", ["halopar", "modelpar"])
@pytest.mark.parametrize("name", LAYERS)
@ranks(2, on="threads")
def test_a_change_of_parameters_before_backward_is_never_silently_wrong(
    comm: Communicator, name: str, mode: str
) -> None:
    serial = filled(nn.Sequential(nn.Conv2d(4, 4, 1), LAYERS[name]()).double(), 0)
    assert gradient(copy.deepcopy(serial), change=True) is None
    model = torchmn.parallelize(serial, comm, mode, input_shape=(4, 8, 6))
    expected = gradient(model, change=False)
    found = gradient(model, change=True)
    # A rule may compute with a copy of a weight: then the gradient is that of the forward that was made.
    assert found is None or torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


class PooledThenChanged(nn.Module):
    """Changes an activation in place after a pool has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x)
        return F.avg_pool2d(x, 2), x.mul_(2)


@ranks(2, on="threads")
def test_an_activation_that_is_changed_after_a_pool_used_it_is_found(comm: Communicator) -> None:
    serial = filled(PooledThenChanged().double(), 0)
    for model in (serial, torchmn.parallelize(serial, comm, "halopar", input_shape=(4, 8, 6))):
        pooled, _ = model(image().requires_grad_())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pooled.sum().backward()
