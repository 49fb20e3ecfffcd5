"""Rules for functions of images: (batch, channel, image dims)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F

from torchmn.sharded.redistribute import gathered
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import RULES, AnyRule, functions_named
from torchmn.sharded.tensor import ShardedTensor


def image_rule(family: str) -> Callable[[AnyRule], AnyRule]:
    """Registers a rule for the torch functions `family`1d, `family`2d and `family`3d.

    The rule gets torch's function for that many dims, then the arguments: a sharded image first, all others whole.
    Where no image is cut, torch's function computes with whole tensors.
    """

    def register(rule: AnyRule) -> AnyRule:
        for dims in (1, 2, 3):
            name = f"{family}{dims}d"
            checked = partial(_of_image, rule, getattr(F, name), dims)
            RULES.update(dict.fromkeys(functions_named(name), checked))
        return rule

    return register


def _of_image(rule: Callable[..., Any], function: Any, dims: int, x: Any, *args: Any, **kwargs: Any) -> Any:
    args = tuple([gathered(value) for value in args])  # weights that a model computes from sharded values
    kwargs = {name: gathered(value) for name, value in kwargs.items()}
    if not isinstance(x, ShardedTensor) or not x.spec.is_tile:
        return function(gathered(x), *args, **kwargs)
    spec = x.spec
    if len(spec.shape) != dims + 2:
        refuse(f"{function.__name__} expects (batch, channel, {dims} image dims), got {spec}")
    if spec.cuts[1] is not None:
        refuse(f"{function.__name__} expects channels in dim 1, which is a cut image dim of {spec}")
    return rule(function, x, *args, **kwargs)


def per_dim(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """A setting of a layer, once per image dim."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values
