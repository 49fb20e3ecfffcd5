"""Models, optimizers and data of tools/golden_worker.py: small, and the same in every process and thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 7  # no number of ranks divides it


def numbers(*shape: int, seed: int) -> Tensor:
    """Values that depend on nothing but the seed: torch's own generator is shared by ranks that are threads."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(model: nn.Module) -> nn.Module:
    """The model with parameters that depend on nothing else."""
    with torch.no_grad():
        for place, (name, p) in enumerate(model.named_parameters()):
            values = numbers(*p.shape, seed=1000 + place)
            fan_in = max(1, p[0].numel()) if p.dim() > 1 else 100
            p.copy_(values / fan_in**0.5 + (1.0 if p.dim() == 1 and name.endswith("weight") else 0.0))
    return model


# Models: name -> what makes it, the shape of a sample, whether it has a class per pixel.


def mlp() -> nn.Module:
    """Large enough for the ways that large messages take, and with extents that no number of ranks divides."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 301), nn.ReLU(), nn.Linear(301, 17), nn.Tanh(), nn.Linear(17, 10))


def mlp_with_norms() -> nn.Module:
    layers = [nn.Linear(13, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Linear(17, 11), nn.LayerNorm(11), nn.Linear(11, 10)]
    return nn.Sequential(*layers)


def mlp_with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(13, 17), nn.Dropout(0.3), nn.ReLU(), nn.Linear(17, 19), nn.Dropout(0.5), nn.Linear(19, 10)
    )


def convolutions() -> nn.Module:
    """Several in a row, with strides, dilations and groups: chains, wide halos and borders."""
    layers: list[nn.Module] = [nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(6, 8, 5, padding=2, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.ReLU()]
    layers += [nn.Conv2d(8, 6, 3, stride=2, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(6 * 12, 10)]
    return nn.Sequential(*layers)


def vgg() -> nn.Module:
    """Batch norm, pools, dropout."""
    layers: list[nn.Module] = []
    for channels, width in ((3, 6), (6, 6), (6, 8)):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(72, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 10))


class UNet(nn.Module):
    """A skip, a transposed convolution, a class per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.norm, self.up = nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 4, 2, 2)
        self.head = nn.Conv2d(8, 10, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.down(x))
        y = F.leaky_relu(self.norm(self.bottom(F.max_pool2d(first, 2))))
        return self.head(torch.cat([self.up(y), first], dim=1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "mlp": (mlp, (1, 28, 28), False),
    "norms": (mlp_with_norms, (13,), False),
    "dropout": (mlp_with_dropout, (13,), False),
    "convolutions": (convolutions, (3, 15, 13), False),
    "vgg": (vgg, (3, 13, 15), False),
    "unet": (UNet, (3, 14, 18), True),
}


# Optimizers: name -> torch's, our options, the norm to clip to.


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any], float | None]] = {
    "sgd": (sgd, {}, None),
    "momentum": (momentum, {}, None),
    "adam": (adam, {}, None),
    "overlap": (momentum, {"overlap": True}, None),
    "double_buffering": (momentum, {"double_buffering": True}, None),
    "bfloat16": (sgd, {"grad_dtype": torch.bfloat16}, None),
    "float16": (adam, {"grad_dtype": torch.float16}, None),
    "clipping": (momentum, {}, 0.1),
}


def batch_of(shape: tuple[int, ...], dense: bool, step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: samples, and the class of each or of each pixel."""
    x = numbers(BATCH, *shape, seed=step)
    places = shape[1:] if dense else ()
    return x, numbers(BATCH, *places, seed=100 + step).mul(10).long().abs() % 10
