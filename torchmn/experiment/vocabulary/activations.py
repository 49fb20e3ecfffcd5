"""Activations, usable as an option (`activation: relu`) or as a layer (`- relu`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from torchmn.experiment.file.fields import Positive
from torchmn.experiment.file.registry import Layer, Options, register_activation, register_layer

WITHOUT_OPTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "relu": (nn.ReLU, ("rectlin",)),
    "tanh": (nn.Tanh, ()),
    "logistic": (nn.Sigmoid, ("sigmoid",)),
    "softmax": (lambda: nn.Softmax(dim=1), ()),
    "identity": (nn.Identity, ()),
    "gelu": (nn.GELU, ()),
    "silu": (nn.SiLU, ("swish",)),
    "softplus": (nn.Softplus, ()),
}


def _register(name: str, aliases: tuple[str, ...], make: Callable[[], nn.Module]) -> None:
    def build(_options: Options, *_: object) -> nn.Module:
        return make()

    for base, register in ((Options, register_activation), (Layer, register_layer)):
        register(name, *aliases)(
            type(f"{name.title()}{base.__name__}", (base,), {"build": build, "__doc__": name, "__module__": __name__})
        )


for _name, (_make, _aliases) in WITHOUT_OPTIONS.items():
    _register(_name, _aliases, _make)


class _Slope(Options):
    slope: Positive = 0.01

    def build(self, *_: object) -> nn.Module:
        return nn.LeakyReLU(self.slope)


class _Alpha(Options):
    alpha: Positive = 1.0

    def build(self, *_: object) -> nn.Module:
        return nn.ELU(self.alpha)


@register_activation("leaky_relu", "rectleaky")
class LeakyReLU(_Slope):
    """max(x, slope x)."""


@register_layer("leaky_relu")
class LeakyReLULayer(_Slope, Layer):
    """max(x, slope x), as a layer."""


@register_activation("elu")
class ELU(_Alpha):
    """x if x > 0, otherwise alpha (exp x - 1)."""


@register_layer("elu")
class ELULayer(_Alpha, Layer):
    """x if x > 0, otherwise alpha (exp x - 1), as a layer."""
