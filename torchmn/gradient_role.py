"""GradientRole: what a parameter's gradient is after backward, and over which ranks it is averaged.

It is the only mark on a parameter. Parallel models set it, layers and rules on tiles obey it, the optimizer reads it.
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
    """What `parameter.grad` is after backward, in DTensor's words.

    Attributes:
        placement: "replicate": the complete gradient, the same on all ranks that share an image. "partial": this rank's
            share of it, counted `tiles` times, so that the mean over ranks is right. "shard": the gradient of this
            rank's own slice of a split parameter.
        over: of a slice, the ranks that hold the same one, over which its gradient is averaged; None: all ranks.
        tiles: of a partial gradient, how many ranks share an image.
        summed_in_backward: the parameter is used with tiles and with whole values, so shares are summed at once.
        counted_at_parameter: all of a partial gradient is a share, because a layer takes the parameter as it is.
        needs_mean: it is not the whole gradient of all samples: only a multi-node optimizer may step.
        known: a parallel model has seen this parameter; False for one that took another's place since.
    """

    placement: Placement = "replicate"
    over: Communicator | None = None
    tiles: int = 1
    summed_in_backward: bool = False
    counted_at_parameter: bool = False
    needs_mean: bool = False
    known: bool = True


UNKNOWN = GradientRole(known=False)


def role_of(parameter: Tensor) -> GradientRole:
    """Returns the role that a parameter was given; `UNKNOWN` for any other tensor."""
    return getattr(parameter, "_torchmn_role", UNKNOWN)


def set_role(parameter: Tensor, role: GradientRole) -> None:
    """Gives a parameter its role."""
    parameter._torchmn_role = role  # type: ignore[attr-defined]


def change_role(parameter: Tensor, **changes: Any) -> None:
    """Changes some attributes of a parameter's role."""
    set_role(parameter, replace(role_of(parameter), **changes))


def let_be_partial(parameter: Tensor, tiles: int) -> None:
    """Lets the mean over ranks of this parameter's gradients be the sum over the `tiles` ranks that share an image."""
    if tiles > 1 and parameter.requires_grad and role_of(parameter).placement != "partial":
        change_role(parameter, placement="partial", tiles=tiles)


def enters(parameter: Tensor, role: GradientRole) -> Tensor:
    """Returns `parameter` as an operand of a computation on tiles: a partial gradient from there counts `tiles` times.

    Not all of its gradient does: what a loss makes of the parameter outside of the model, such as an L1 penalty, is the
    same on every rank.
    """
    if role.placement != "partial" or role.counted_at_parameter:
        return parameter
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter
    used = parameter.view_as(parameter)
    used.register_hook(partial(_counted_where_it_entered, parameter))
    return used


def count_at_parameter(parameter: Tensor) -> None:
    """Lets all of a partial gradient count `tiles` times: a layer of a user's own takes the parameter as it is."""
    role = role_of(parameter)
    if role.placement == "partial" and not role.counted_at_parameter and parameter.requires_grad:
        change_role(parameter, counted_at_parameter=True)
        parameter.register_hook(lambda gradient: gradient * _factor(role.tiles))


def _counted_where_it_entered(parameter: Tensor, gradient: Tensor) -> Tensor | None:
    role = role_of(parameter)
    # What entered before `count_at_parameter` is counted there.
    return None if role.counted_at_parameter else gradient * _factor(role.tiles)


@lru_cache(maxsize=64)
def _factor(tiles: int) -> Tensor:
    # As a tensor: torch takes twice as long to multiply by a number, and every parameter comes here at every step.
    return torch.tensor(float(tiles))
