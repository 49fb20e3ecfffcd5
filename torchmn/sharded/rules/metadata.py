"""What a ShardedTensor says of itself: the global shape; dtype, device and the graph are those of its values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchmn.sharded.registry import functions_named, names, rule
from torchmn.sharded.tensor import RULES, ShardedTensor, local, wrap


@rule("shape")
def shape(x: ShardedTensor, *_: Any) -> torch.Size:
    return torch.Size(x.spec.shape)


@rule("size")
def size(x: ShardedTensor, dim: int | None = None) -> torch.Size | int:
    whole = torch.Size(x.spec.shape)
    return whole if dim is None else whole[dim]


@rule("numel", "nelement")
def numel(x: ShardedTensor) -> int:
    return torch.Size(x.spec.shape).numel()


@rule("__len__")
def length(x: ShardedTensor) -> int:
    return x.spec.shape[0]


@rule("__repr__")
def representation(x: ShardedTensor, **_: Any) -> str:
    return f"ShardedTensor of {x.spec}, this rank's: {local(x)!r}"


@rule("type_as")
def type_as(x: Tensor, other: Tensor) -> Tensor:
    result = x.to(dtype=other.dtype, device=other.device)
    return wrap(result, x.spec) if isinstance(x, ShardedTensor) else result


def _made(function: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """A new tensor of the shape that is asked for, whole on every rank."""
    return function(local(x), *args, **kwargs)


for _name in names("new_zeros new_ones new_full new_empty new_tensor"):
    for _function in functions_named(_name):
        RULES[_function] = partial(_made, _function)


_TOLD_BY_THE_VALUES = names(
    "dim ndimension ndim dtype device requires_grad grad_fn is_leaf is_cuda is_cpu is_meta layout is_sparse "
    "is_quantized is_mkldnn is_nested is_floating_point is_complex is_signed is_contiguous itemsize element_size "
    "requires_grad_ _version get_device is_inference output_nr has_names __hash__ "
    "is_conj is_neg name grad_dtype retains_grad is_xpu is_mps data_ptr stride"
)
for _name in _TOLD_BY_THE_VALUES:
    for _function in functions_named(_name):
        RULES[_function] = _function


def _kept(function: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    result = function(x, *args, **kwargs)
    return result if result is x or result is None else wrap(result, x.spec)


_SAME_ELEMENTS = names(
    "detach clone contiguous to float double half bfloat16 bool int long short char byte type cpu cuda grad detach_ "
    "alias"
)
for _name in _SAME_ELEMENTS:
    for _function in functions_named(_name):
        RULES[_function] = partial(_kept, _function)


def _tile_alone(function: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Whoever watches the tile's gradient, or may write to it unseen, makes it the only thing that is computed with."""
    x.extra = None
    return _kept(function, x, *args, **kwargs) if function in _DATA else function(x, *args, **kwargs)


_DATA = functions_named("data")
for _function in (*functions_named("retain_grad"), *_DATA):
    RULES[_function] = partial(_tile_alone, _function)


@rule("register_hook")
def register_hook(x: ShardedTensor, hook: Any) -> Any:
    """The hook gets the gradient as a part, too: its norm is that of the whole gradient."""
    layout, x.extra = x.spec, None

    def of_part(gradient: Tensor) -> Tensor | None:
        result = hook(wrap(gradient, layout))
        return local(result) if isinstance(result, ShardedTensor) else result

    return Tensor.register_hook(x, of_part)
