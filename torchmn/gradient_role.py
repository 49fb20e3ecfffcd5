"""GradientRole: what a parameter's gradient is after backward, and over which ranks it is averaged.

It is the only attribute that TorchMN sets on a parameter. Parallel models set it; layers, rules for sharded tensors and
the optimizer read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator

Placement = Literal["replicate", "partial", "shard"]


@dataclass(frozen=True)
class GradientRole:
    """What `parameter.grad` is after backward. Placements are named as in DTensor.

    Attributes:
        placement: "replicate": the complete gradient, the same on all ranks that share an image. "partial": this rank's
            part of the sum, multiplied by `tiles`, so that the mean over ranks is the gradient. "shard": the gradient
            of this rank's slice of a split parameter.
        over: of a slice, the ranks that hold the same slice, over which its gradient is averaged; None for all ranks.
        tiles: of a partial gradient, how many ranks share an image.
        summed_in_backward: the parameter is used with tiles and with whole values, so backward sums the parts.
        counted_at_parameter: the whole gradient is multiplied by `tiles`, because a layer uses the parameter itself and
            not `enters(parameter)`.
        needs_mean: the gradient is not that of all samples, so only a multi-node optimizer may step.
        known: a parallel model has set this role; False for a parameter that was replaced since.
    """

    placement: Placement = "replicate"
    over: Communicator | None = None
    tiles: int = 1
    summed_in_backward: bool = False
    counted_at_parameter: bool = False
    needs_mean: bool = False
    known: bool = True


UNKNOWN = GradientRole(known=False)
_ROLE = "_torchmn_role"


def role_of(parameter: Tensor) -> GradientRole:
    """Returns the role of a parameter; `UNKNOWN` for any other tensor."""
    return getattr(parameter, _ROLE, UNKNOWN)


def set_role(parameter: Tensor, role: GradientRole) -> None:
    """Sets the role of a parameter."""
    setattr(parameter, _ROLE, role)


def change_role(parameter: Tensor, **changes: Any) -> None:
    """Changes some attributes of a parameter's role."""
    set_role(parameter, replace(role_of(parameter), **changes))


def make_partial(parameter: Tensor, tiles: int) -> None:
    """Sets the placement to "partial": the mean of gradients over ranks is the sum over the `tiles` of an image."""
    if tiles > 1 and parameter.requires_grad and role_of(parameter).placement != "partial":
        change_role(parameter, placement="partial", tiles=tiles)


def enters(parameter: Tensor, role: GradientRole) -> Tensor:
    """Returns `parameter` as an operand of a computation on tiles, whose partial gradient is multiplied by `tiles`.

    The other parts of its gradient are not: that of a penalty in the loss, such as L1, is the same on every rank.
    """
    if role.placement != "partial" or role.counted_at_parameter:
        return parameter
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter
    operand = parameter.view_as(parameter)
    operand.register_hook(partial(_scale_operand_gradient, parameter))
    return operand


def count_at_parameter(parameter: Tensor) -> None:
    """Multiplies the whole of a partial gradient by `tiles`, for a layer of the user that uses the parameter itself."""
    role = role_of(parameter)
    if role.placement == "partial" and not role.counted_at_parameter and parameter.requires_grad:
        change_role(parameter, counted_at_parameter=True)
        parameter.register_hook(lambda gradient: gradient * _factor(role.tiles))


def _scale_operand_gradient(parameter: Tensor, gradient: Tensor) -> Tensor | None:
    role = role_of(parameter)
    # After `count_at_parameter`, its hook multiplies.
    return None if role.counted_at_parameter else gradient * _factor(role.tiles)


@lru_cache(maxsize=64)
def _factor(tiles: int) -> Tensor:
    # A tensor: torch takes twice as long to multiply by a number, for every parameter at every step.
    return torch.tensor(float(tiles))
