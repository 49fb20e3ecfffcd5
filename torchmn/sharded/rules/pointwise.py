"""Rules for elementwise functions, which need no communication."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.sharded.redistribute import gathered, replicated_operand, shard_like, whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import RULES, functions_named, names, rule
from torchmn.sharded.sharding import AnyCut, FlatCut, Sharding
from torchmn.sharded.tensor import ShardedTensor, wrap

ACTIVATIONS = names(
    "relu relu6 elu selu celu leaky_relu gelu silu mish sigmoid tanh softplus softsign tanhshrink softshrink "
    "hardshrink hardtanh hardsigmoid hardswish logsigmoid threshold"
)
ARITHMETIC = names(
    "add sub subtract mul multiply div divide true_divide remainder fmod floor_divide pow rsub neg negative abs "
    "absolute sign sgn square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 "
    "sinh cosh asinh acosh atanh erf erfc erfinv expit logit reciprocal floor ceil round trunc frac clamp clip "
    "clamp_min clamp_max nan_to_num maximum minimum fmax fmin lerp addcmul addcdiv where masked_fill isnan isinf "
    "isfinite eq ne lt le gt ge greater greater_equal less less_equal not_equal logical_and logical_or "
    "logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor hypot copysign xlogy logaddexp "
    "zeros_like ones_like full_like empty_like sigmoid positive real imag conj deg2rad heaviside float_power sinc"
)
OPERATORS = names(
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ "
    "__rpow__ __mod__ __floordiv__ __rfloordiv__ __neg__ __abs__ __invert__ __and__ __or__ __xor__ __eq__ __ne__ "
    "__lt__ __le__ __gt__ __ge__ __pos__ __rmod__"
)
IN_PLACE = names("__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ fill_ zero_ __iand__ __ior__")


def pointwise(function: Any, in_place: bool, *args: Any, **kwargs: Any) -> Any:
    """Returns an elementwise function of shards, after bringing all operands to one sharding.

    Args:
        function: of torch.
        in_place: whether it changes its first argument.
    """
    in_place = in_place or bool(kwargs.get("inplace"))  # a keyword of activations in torch.nn.functional
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if len(tensors) == 1 and args and args[0] is tensors[0]:  # fast path for activations
        result = function(*args, **kwargs)
        return args[0] if in_place else wrap(result, args[0].spec)
    sharded = [x for x in tensors if isinstance(x, ShardedTensor)]
    replicated = [x for x in tensors if not isinstance(x, ShardedTensor)]
    if in_place and not (args and isinstance(args[0], ShardedTensor)):
        refuse(f"{function.__name__!r} would change a whole tensor with the values of a cut one {sharded[0].spec}")
    if len(sharded) == 1 and not replicated:
        layout, operands = sharded[0].spec, args
    else:
        layout = broadcast_layout(sharded, replicated)
        if layout is None:
            if in_place:
                refuse(f"{function.__name__!r} in place, of vectors that are cut in different ways, is not supported")
            return function(*[gathered(x) for x in args], **kwargs)
        operands = [operand(x, layout) for x in args]
        kwargs = {name: operand(x, layout) for name, x in kwargs.items()}
        if in_place and layout.shape != args[0].spec.shape:
            refuse(f"{function.__name__!r} in place: {args[0].spec} cannot become {layout}")
    result = function(*operands, **kwargs)
    return args[0] if in_place else wrap(result, layout)


def operand(x: Any, layout: Sharding) -> Any:
    """Returns `x` as an operand of shards of `layout`: whole tensors are cut where they have the global extent."""
    if isinstance(x, ShardedTensor) and _is_broadcast(x, layout.shape):
        x = whole(x)
    if not isinstance(x, Tensor) or isinstance(x, ShardedTensor):
        return x
    new_dims = len(layout.shape) - x.dim()
    return shard_like(replicated_operand(x, layout), layout, {dim: dim + new_dims for dim in range(x.dim())})


def broadcast_layout(sharded: list[ShardedTensor], replicated: list[Tensor]) -> Sharding | None:
    """Returns the sharding to which these tensors broadcast; None for vectors that are cut in different ways."""
    shapes = [x.spec.shape for x in sharded] + [tuple(x.shape) for x in replicated]
    shape = torch.broadcast_shapes(*shapes)
    cuts: list[AnyCut] = [None] * len(shape)
    sharded = [x for x in sharded if not _is_broadcast(x, shape)] or sharded
    for x in sharded:
        new_dims = len(shape) - len(x.spec.shape)
        for dim in x.spec.cut_dims:
            cuts[dim + new_dims] = x.spec.cuts[dim]
    if _two_along_one_axis(cuts):  # x[:, :, None] * x[:, None]: each rank could only compute pairs of its elements
        if not any(x.spec.is_tile for x in sharded):
            return None
        refuse(f"operands are cut along the same axis in different dims: {', '.join(str(x.spec) for x in sharded)}")
    layout = sharded[0].spec.with_dims(tuple(shape), tuple(cuts))
    for x in sharded:
        new_dims = len(shape) - len(x.spec.shape)
        for dim, extent in enumerate(x.spec.shape):
            if extent != 1 and x.spec.cuts[dim] != cuts[dim + new_dims]:
                if not any(y.spec.is_tile for y in sharded):
                    return None
                refuse(f"operands are cut in different ways: {sharded[0].spec} and {x.spec}")
    return layout


def _two_along_one_axis(cuts: Sequence[AnyCut]) -> bool:
    images = [cut.cuts if isinstance(cut, FlatCut) else (cut,) for cut in cuts]
    axes = [cut.axis for image in images for cut in image if cut is not None]
    return len(set(axes)) < len(axes)


def _is_broadcast(x: ShardedTensor, shape: Sequence[int]) -> bool:
    """Whether a cut dim of extent 1, which one rank holds, would be broadcast to all ranks."""
    new_dims = len(shape) - len(x.spec.shape)
    return any(x.spec.shape[dim] == 1 and shape[dim + new_dims] != 1 for dim in x.spec.cut_dims)


def _register() -> None:
    for name in (*ACTIVATIONS, *ARITHMETIC, *OPERATORS):
        for function in functions_named(name):
            RULES[function] = partial(pointwise, function, False)
        for function in functions_named(f"{name}_"):
            RULES[function] = partial(pointwise, function, True)
    for name in IN_PLACE:
        for function in functions_named(name):
            RULES[function] = partial(pointwise, function, True)


_register()


@rule("rrelu", "rrelu_")
def randomized_relu(
    x: ShardedTensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    **_: Any,
) -> Tensor:
    if training:
        refuse("rrelu in training draws random slopes, which is not supported on cut tensors. Use LeakyReLU")
    return pointwise(F.rrelu, inplace, x, lower, upper, False, inplace)


@rule("prelu")
def prelu(x: ShardedTensor, weight: Tensor) -> Tensor:
    layout = x.spec
    weight = replicated_operand(weight, layout)
    if len(layout.shape) > 1:  # one weight per channel, or one for all
        weight = shard_like(weight, layout, {0: 1})
    return wrap(torch.prelu(x, weight), layout)
