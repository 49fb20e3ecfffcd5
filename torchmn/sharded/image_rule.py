"""image_rule: registers rules for functions of images of shape (batch, channel, *image)."""

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
    """Registers a rule for a family of torch functions, such as "conv" for conv1d, conv2d and conv3d.

    The rule is called with the torch function, the sharded image and the other arguments, which are whole. It is not
    called if no image is cut: then the torch function computes with gathered tensors.
    """

    def register(rule: AnyRule) -> AnyRule:
        for dims in (1, 2, 3):
            name = f"{family}{dims}d"
            checked = partial(_check_and_compute, rule, getattr(F, name), dims)
            RULES.update(dict.fromkeys(functions_named(name), checked))
        return rule

    return register


def _check_and_compute(rule: Callable[..., Any], function: Any, dims: int, x: Any, *args: Any, **kwargs: Any) -> Any:
    args = tuple([gathered(value) for value in args])  # a model may compute weights from sharded values
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
    """Returns a setting such as a stride as a tuple with one number per image dim."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values
