"""Options common to layers with weights (initializer, optimizer, activation), and checks of shapes and windows."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator
from torch import Tensor, nn

from torchmn.experiment.file import registry
from torchmn.experiment.file.fields import (
    DEFINITION,
    ActivationField,
    Count,
    Fraction,
    InitializerField,
    NotNegative,
    ReferenceOrNested,
    Resolved,
    invalid,
    wrong_value,
)
from torchmn.experiment.file.registry import Layer, Options, Section


class Ramp(Section):
    """A momentum that changes linearly from one value to another, between two epochs."""

    model_config = ConfigDict(populate_by_name=True)

    first: Fraction = Field(alias="from")
    last: Fraction = Field(alias="to")
    start: int = Field(0, ge=0)
    end: Count

    @model_validator(mode="after")
    def _check_order(self) -> Ramp:
        if self.end < self.start:
            raise invalid(f"ends at epoch {self.end}, before it starts at {self.start}")
        return self

    def at(self, epoch: int) -> float:
        """Returns the momentum in `epoch`, counted from 0."""
        done = min(max((epoch - self.start) / max(self.end - self.start, 1), 0.0), 1.0)
        return self.first + (self.last - self.first) * done


Momentum = Annotated[
    Annotated[Fraction, Tag("#number")] | Annotated[Ramp, Tag("#ramp")],
    Discriminator(lambda value: "#ramp" if isinstance(value, dict | Ramp) else "#number"),
]


Shape = tuple[int, ...]
ParameterGroup = dict[str, Any]
"""A group of parameters of a torch optimizer: `params` and options such as `lr`."""


class LayerOptimizer(Section):
    """Optimizer options of a single layer, which replace those of the optimizer."""

    lr: NotNegative | None = None
    momentum: Momentum | None = None
    weight_decay: NotNegative | None = None

    def as_group(self) -> ParameterGroup:
        """Returns the options as keys of a parameter group; the key `ramp` holds a momentum ramp."""
        group = self.model_dump(exclude_none=True)
        if isinstance(self.momentum, Ramp):
            group |= {"momentum": self.momentum.at(0), "ramp": self.momentum.model_dump(by_alias=True)}
        return group


def _check_optimizer(value: object) -> object:
    if value is not None and not isinstance(value, LayerOptimizer | Options):
        raise wrong_value("options such as {lr: 0.001}, or the name of an optimizer")
    return value


LayerOptimizerField = Resolved[
    LayerOptimizer | Options | None,
    ReferenceOrNested(registry.optimizers, LayerOptimizer),
    BeforeValidator(_check_optimizer),
    WithJsonSchema({"anyOf": [{DEFINITION: "optimizer"}, {DEFINITION: "LayerOptimizer"}, {"type": "null"}]}),
]
"""Options that replace those of the experiment's optimizer, or another optimizer, which has a `name`."""
OWN = "optimizer"
"""The key of a parameter group for an optimizer other than the experiment's."""


def optimizer_group(chosen: LayerOptimizer | Options) -> ParameterGroup:
    """Returns the keys of a parameter group for the value of a LayerOptimizerField."""
    return chosen.as_group() if isinstance(chosen, LayerOptimizer) else {OWN: chosen}


def _bias_init(value: object) -> float | str | None:
    if value is None or (isinstance(value, str) and value == "init"):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise wrong_value("a number, or `init` for the initializer of the weights")


BiasInit = Resolved[
    float | Literal["init"] | None,
    BeforeValidator(_bias_init),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "init"}, {"type": "null"}]}),
]


class WeightedLayer(Layer):
    """Base class of layers with weights. `build` uses torch's initial values, `init_weights` those of the options."""

    activation: ActivationField = Field(None, description="the activation after the layer, such as relu")
    batch_norm: bool = Field(False, description="whether batch normalisation precedes the activation")
    bias: bool = True
    init: InitializerField = Field(
        None, description="the initializer of the weights, such as {name: gaussian, std: 0.01}"
    )
    bias_init: BiasInit = Field(
        None, description="the initial bias: a number, or `init` for the initializer of the weights"
    )
    optimizer: LayerOptimizerField = Field(
        None, description="optimizer options of this layer, such as {lr: 0.001}, or another optimizer: {name: adam}"
    )
    bias_optimizer: LayerOptimizerField = Field(
        None, description="the same for its bias, in place of `optimizer`; {} for the experiment's optimizer"
    )

    @model_validator(mode="after")
    def _check_bias_init(self) -> WeightedLayer:
        if self.bias_init == "init" and self.init is None:
            raise invalid("has bias_init: init, which needs an init, such as {name: gaussian, std: 0.01}")
        return self

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        """Initialises the weights and biases of a module that `init` and `bias_init` apply to."""
        for name, parameter in module.named_parameters():
            if "bias" in name:
                if self.bias_init == "init":
                    WeightedLayer.fill(self, parameter)  # not self.fill: LocalLayer overrides it for filters
                elif self.bias_init is not None:
                    parameter.fill_(self.bias_init)
            elif self.init is not None:
                self.fill(parameter)

    def fill(self, weight: Tensor) -> None:
        """Fills a weight with the values of `init`, which must be set."""
        assert self.init is not None
        self.init.build()(weight)


def set_attributes(module: nn.Module, **attributes: object) -> None:
    """Sets attributes that are neither tensors nor modules, which nn.Module's type annotations do not allow."""
    vars(module).update(attributes)


def per_dim(value: int | tuple[int, ...], dims: int, name: str) -> tuple[int, ...]:
    """Returns one number per dim; raises a ValueError if `value` has another length."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) != dims:
        raise ValueError(f"expected {name} to have {dims} numbers, one per spatial dim, got {len(values)}")
    return values


def image_dims(kind: str, shape: Shape) -> int:
    """Returns the number of spatial dims of an image: 1, 2 or 3."""
    if not 2 <= len(shape) <= 4:
        raise ValueError(
            f"{kind} needs images of shape (maps, height, width), got samples of shape {format_shape(shape)}"
        )
    return len(shape) - 1


def check_window(
    extents: Shape, kernel: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...] | None = None
) -> None:
    """Raises a ValueError if a window is larger than the padded image."""
    dilation = dilation or (1,) * len(extents)
    for extent, k, p, d in zip(extents, kernel, padding, dilation, strict=True):
        if (k - 1) * d + 1 > extent + 2 * p:
            stretched = f" with dilation {d}" if d > 1 else ""
            padded = f" with padding {p}" if p else ""
            raise ValueError(
                f"a kernel of {k}{stretched} does not fit into an image of {format_shape(extents)}{padded}"
            )


BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}


def batch_norm_for(shape: Shape, **options: float) -> nn.Module:
    """Returns a batch normalisation for samples of this shape."""
    if len(shape) not in BATCH_NORMS:
        raise ValueError(f"batch_norm needs vectors or images, got samples of shape {format_shape(shape)}")
    return BATCH_NORMS[len(shape)](shape[0], **options)


def format_shape(shape: Shape) -> str:
    """Returns a shape as in messages: 1 x 28 x 28."""
    return " x ".join(map(str, shape))
