"""Rules for attributes and conversions: the shape is the global one; dtype, device and graph are those of the shard."""

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


def _new_tensor(function: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Returns a new tensor, whole on every rank."""
    return function(local(x), *args, **kwargs)


for _name in names("new_zeros new_ones new_full new_empty new_tensor"):
    for _function in functions_named(_name):
        RULES[_function] = partial(_new_tensor, _function)


_ATTRIBUTES_OF_THE_SHARD = names(
    "dim ndimension ndim dtype device requires_grad grad_fn is_leaf is_cuda is_cpu is_meta layout is_sparse "
    "is_quantized is_mkldnn is_nested is_floating_point is_complex is_signed is_contiguous itemsize element_size "
    "requires_grad_ _version get_device is_inference output_nr has_names __hash__ "
    "is_conj is_neg name grad_dtype retains_grad is_xpu is_mps data_ptr stride"
)
for _name in _ATTRIBUTES_OF_THE_SHARD:
    for _function in functions_named(_name):
        RULES[_function] = _function


def _convert(function: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    result = function(x, *args, **kwargs)
    return result if result is x or result is None or not isinstance(x, ShardedTensor) else wrap(result, x.spec)


_SAME_ELEMENTS = names(
    "detach clone contiguous to float double half bfloat16 bool int long short char byte type cpu cuda grad detach_ "
    "alias"
)
for _name in _SAME_ELEMENTS:
    for _function in functions_named(_name):
        RULES[_function] = partial(_convert, _function)


def _drop_halo(function: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Drops the halo in `extra`: a gradient must pass through the tile, and writes to `.data` go to the tile only."""
    x.extra = None
    return _convert(function, x, *args, **kwargs) if function in _DATA else function(x, *args, **kwargs)


_DATA = functions_named("data")
for _function in (*functions_named("retain_grad"), *_DATA):
    RULES[_function] = partial(_drop_halo, _function)


@rule("register_hook")
def register_hook(x: ShardedTensor, hook: Any) -> Any:
    """Registers a hook that gets the gradient as a ShardedTensor, so that its norm is that of the global gradient."""
    layout, x.extra = x.spec, None

    def sharded_hook(gradient: Tensor) -> Tensor | None:
        result = hook(wrap(gradient, layout))
        return local(result) if isinstance(result, ShardedTensor) else result

    return Tensor.register_hook(x, sharded_hook)
