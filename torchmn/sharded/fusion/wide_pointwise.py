"""Wrappers around the rules of elementwise functions and of cat, which compute tiles together with their wide halo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import version_of
from torchmn.sharded.fusion.wide_halo import smallest_margin, wide_tiles_of, wrap_wide
from torchmn.sharded.registry import Rule, functions_named, names, wrap_rule
from torchmn.sharded.tensor import ShardedTensor

# Functions that are finite with a finite slope for every finite argument. The values in the outermost rows of a halo
# are not right and their gradient is zero: backward must not multiply that zero by infinity.
_SAFE = names(
    "relu relu6 elu selu celu leaky_relu gelu silu mish sigmoid tanh softplus softsign tanhshrink softshrink "
    "hardshrink hardtanh hardsigmoid hardswish logsigmoid threshold neg negative abs absolute square sin cos erf clamp "
    "clip clamp_min clamp_max positive add sub subtract mul multiply rsub __neg__ __pos__ __abs__ __add__ __radd__ "
    "__sub__ __rsub__ __mul__ __rmul__ __iadd__ __isub__ __imul__"
)
_SAFE_WITH_TWO_TILES = names(
    "add sub subtract mul multiply maximum minimum __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __iadd__ "
    "__isub__ __imul__"
)
_SAFE_IN_PLACE_OPERATORS = names("__iadd__ __isub__ __imul__")


def pointwise(operands: int, in_place: bool, function: Any, rule: Rule, *args: Any, **kwargs: Any) -> Any:
    """Wrapper around the rule of an elementwise function.

    Args:
        operands: how many tensors it may have to be computed on wide tiles, 1 or 2.
        in_place: whether the function changes its first argument.
    """
    if not args or getattr(args[0], "extra", None) is None:
        return rule(*args, **kwargs)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if len(tensors) > operands or "other" in kwargs:
        return rule(*args, **kwargs)
    done = _compute_wide(function, in_place or bool(kwargs.get("inplace")), args, kwargs, len(tensors))
    return rule(*args, **kwargs) if done is None else done


def _compute_wide(
    function: Any, in_place: bool, args: Sequence[Any], kwargs: dict, operands: int
) -> ShardedTensor | None:
    """Returns the function of tiles with their halos; None if one of the `operands` first arguments has no halo."""
    wides = wide_tiles_of(args[:operands])
    if wides is None or (operands == 2 and args[0].spec.shape != args[1].spec.shape):
        return None
    margin, first = smallest_margin(wides), wides[0]
    if not in_place and not any(margin):
        return None  # no row of the halo holds right values any more
    result = function(*[wide.tensor for wide in wides], *args[operands:], **kwargs)
    if in_place:
        args[0].extra = first._replace(margin=margin, version=version_of(first.tensor))
        return args[0]
    return wrap_wide(result, args[0].spec, first.width, margin, first.run)


@wrap_rule("cat", "concat", "concatenate")
def concatenation(function: Any, rule: Rule, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Wrapper around the rule of cat, for tiles with halos along channels."""
    wides = wide_tiles_of(tensors) if dim in (1, 1 - tensors[0].dim()) else None
    if wides is None or not any(margin := smallest_margin(wides)):
        return rule(tensors, dim)
    specs = [x.spec for x in tensors if isinstance(x, ShardedTensor)]
    shape = (specs[0].shape[0], sum(spec.shape[1] for spec in specs), *specs[0].shape[2:])
    result = specs[0].with_dims(shape, specs[0].cuts)
    return wrap_wide(torch.cat([wide.tensor for wide in wides], 1), result, wides[0].width, margin, wides[0].run)


def _register() -> None:
    for name in _SAFE:
        operands = 2 if name in _SAFE_WITH_TWO_TILES else 1
        in_place = functions_named(f"{name}_") if name not in _SAFE_IN_PLACE_OPERATORS else functions_named(name)
        wrap_rule(*in_place)(partial(pointwise, operands, True))
        if name not in _SAFE_IN_PLACE_OPERATORS:
            wrap_rule(name)(partial(pointwise, operands, False))
    for name in ("maximum", "minimum"):
        wrap_rule(name)(partial(pointwise, 2, False))


_register()
