"""What layers with weights have in common: how the weights begin and learn, and what follows the layer."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator
from torch import Tensor, nn

from torchmn.experiment.file.fields import ActivationField, Count, InitializerField, NotNegative, Share, problem, refuse
from torchmn.experiment.file.registry import Layer


class Ramp(BaseModel):
    """A momentum that goes in a line from one value to another, between two epochs."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    first: Share = Field(alias="from")
    last: Share = Field(alias="to")
    start: int = Field(0, ge=0)
    end: Count

    @model_validator(mode="after")
    def _in_order(self) -> Ramp:
        if self.end < self.start:
            raise problem(f"ends at epoch {self.end}, before it starts at {self.start}")
        return self

    def at(self, epoch: int) -> float:
        done = min(max((epoch - self.start) / max(self.end - self.start, 1), 0.0), 1.0)
        return self.first + (self.last - self.first) * done


Momentum = Annotated[
    Annotated[Share, Tag("#number")] | Annotated[Ramp, Tag("#ramp")],
    Discriminator(lambda value: "#ramp" if isinstance(value, dict | Ramp) else "#number"),
]


Shape = tuple[int, ...]


class OwnRule(BaseModel):
    """Where a layer learns otherwise than the optimizer says."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    lr: NotNegative | None = None
    momentum: Momentum | None = None
    weight_decay: NotNegative | None = None

    def as_group(self) -> dict[str, Any]:
        """What torch's optimizers know of it; a momentum that changes stands under `ramp`."""
        rule = self.model_dump(exclude_none=True)
        if isinstance(self.momentum, Ramp):
            rule |= {"momentum": self.momentum.at(0), "ramp": self.momentum.model_dump(by_alias=True)}
        return rule


def _bias_init(value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if value is None or value == "init":
        return value
    if not number:
        raise refuse("a number, or `init` for what `init` says")
    return float(value)


BiasInit = Annotated[
    Any,
    BeforeValidator(_bias_init),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "init"}, {"type": "null"}]}),
]


class Weighted(Layer):
    """A layer with weights: `build` makes it with torch's own initial values, `begin` gives it those of the file."""

    activation: ActivationField = Field(None, description="what follows, as relu")
    batch_norm: bool = Field(False, description="normalise over the batch before the activation")
    bias: bool = True
    init: InitializerField = Field(None, description="how the weights begin, as {name: gaussian, std: 0.01}")
    bias_init: BiasInit = Field(None, description="with what the bias begins: a number, or `init` for what `init` says")
    optimizer: OwnRule | None = Field(None, description="where this layer learns otherwise, as {lr: 0.001}")

    @model_validator(mode="after")
    def _bias_has_values(self) -> Weighted:
        if self.bias_init == "init" and self.init is None:
            raise problem("has bias_init: init, which needs an init, as {name: gaussian, std: 0.01}")
        return self

    @torch.no_grad()
    def begin(self, module: nn.Module) -> None:
        """Set the module's weights as the file says; nothing said, nothing changed."""
        for name, parameter in module.named_parameters():
            if "bias" in name:
                if self.bias_init == "init":
                    Weighted.fill(self, parameter)
                elif self.bias_init is not None:
                    parameter.fill_(self.bias_init)
            elif self.init is not None:
                self.fill(parameter)

    def fill(self, weight: Tensor) -> None:
        """Let weights begin as `init` says."""
        self.init.build()(weight)


def per_dim(value: int | tuple[int, ...], dims: int, name: str) -> tuple[int, ...]:
    """One number for each of `dims` dims."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) != dims:
        raise ValueError(f"{name} has {len(values)} numbers, and the input {dims} dims beside its maps")
    return values


def image_dims(kind: str, shape: Shape) -> int:
    """How many dims an image has beside its maps: 1, 2 or 3."""
    if not 2 <= len(shape) <= 4:
        raise ValueError(f"{kind} needs images of shape (maps, height, width), got samples of shape {text(shape)}")
    return len(shape) - 1


def check_window(
    extents: Shape, kernel: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...] | None = None
) -> None:
    """Raise if a window is larger than the padded image."""
    dilation = dilation or (1,) * len(extents)
    for extent, k, p, d in zip(extents, kernel, padding, dilation, strict=True):
        if (k - 1) * d + 1 > extent + 2 * p:
            stretched = f" with dilation {d}" if d > 1 else ""
            padded = f" with padding {p}" if p else ""
            raise ValueError(f"a kernel of {k}{stretched} does not fit into an image of {text(extents)}{padded}")


BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}


def batch_norm_for(shape: Shape, **options: float) -> nn.Module:
    """The batch normalisation of samples of this shape."""
    if len(shape) not in BATCH_NORMS:
        raise ValueError(f"batch_norm needs vectors or images, got samples of shape {text(shape)}")
    return BATCH_NORMS[len(shape)](shape[0], **options)


def text(shape: Shape) -> str:
    return " x ".join(map(str, shape))
