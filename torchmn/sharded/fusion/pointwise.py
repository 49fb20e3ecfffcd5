"""Functions of single elements, and concatenation of channels, that compute what lies around the tile, too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import version_of
from torchmn.sharded.fusion.wide import smallest_margin, wide_part, wides_of
from torchmn.sharded.registry import Rule, around, functions_named, names
from torchmn.sharded.tensor import ShardedTensor

# Finite with a finite slope wherever its argument is finite: so in rows around a tile whose values are not right, and
# whose gradient is zero, no zero is ever multiplied by infinity.
_TAME_ALONE = names(
    "relu relu6 elu selu celu leaky_relu gelu silu mish sigmoid tanh softplus softsign tanhshrink softshrink "
    "hardshrink hardtanh hardsigmoid hardswish logsigmoid threshold neg negative abs absolute square sin cos erf clamp "
    "clip clamp_min clamp_max positive add sub subtract mul multiply rsub __neg__ __pos__ __abs__ __add__ __radd__ "
    "__sub__ __rsub__ __mul__ __rmul__ __iadd__ __isub__ __imul__"
)
_TAME_TOGETHER = names(
    "add sub subtract mul multiply maximum minimum __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __iadd__ "
    "__isub__ __imul__"
)
_TAME_OPERATORS_IN_PLACE = names("__iadd__ __isub__ __imul__")


def pointwise(operands: int, in_place: bool, function: Any, rule: Rule, *args: Any, **kwargs: Any) -> Any:
    """Around the rule of a function with one or two operands.

    Args:
        operands: 1 or 2, whatever the function can take.
        in_place: whether the function changes its first argument.
    """
    if not args or getattr(args[0], "extra", None) is None:
        return rule(*args, **kwargs)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if len(tensors) > operands or "other" in kwargs:
        return rule(*args, **kwargs)
    done = _on_wide(function, in_place or bool(kwargs.get("inplace")), args, kwargs, len(tensors))
    return rule(*args, **kwargs) if done is None else done


def _on_wide(function: Any, in_place: bool, args: Sequence[Any], kwargs: dict, operands: int) -> ShardedTensor | None:
    """The same for what lies around the tiles of the first `operands` arguments; None if they do not remember it."""
    wides = wides_of(args[:operands])
    if wides is None or (operands == 2 and args[0].spec.shape != args[1].spec.shape):
        return None
    margin, first = smallest_margin(wides), wides[0]
    if not in_place and not any(margin):  # of no use any more; and a result of the tile alone is a tensor of its own
        return None
    result = function(*[wide.tensor for wide in wides], *args[operands:], **kwargs)
    if in_place:
        args[0].extra = first._replace(margin=margin, version=version_of(first.tensor))
        return args[0]
    return wide_part(result, args[0].spec, first.width, margin, first.run)


@around("cat", "concat", "concatenate")
def concatenation(function: Any, rule: Rule, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Along channels, of tiles that all remember what lies around them."""
    wides = wides_of(tensors) if dim in (1, 1 - tensors[0].dim()) else None
    if wides is None or not any(margin := smallest_margin(wides)):
        return rule(tensors, dim)
    spec = tensors[0].spec  # type: ignore[attr-defined]
    channels = sum(x.spec.shape[1] for x in tensors)  # type: ignore[attr-defined]
    result = spec.with_dims((spec.shape[0], channels, *spec.shape[2:]), spec.cuts)
    return wide_part(torch.cat([wide.tensor for wide in wides], 1), result, wides[0].width, margin, wides[0].run)


def _register() -> None:
    for name in _TAME_ALONE:
        operands = 2 if name in _TAME_TOGETHER else 1
        in_place = functions_named(f"{name}_") if name not in _TAME_OPERATORS_IN_PLACE else functions_named(name)
        around(*in_place)(partial(pointwise, operands, True))
        if name not in _TAME_OPERATORS_IN_PLACE:
            around(name)(partial(pointwise, operands, False))
    for name in ("maximum", "minimum"):
        around(name)(partial(pointwise, 2, False))


_register()
