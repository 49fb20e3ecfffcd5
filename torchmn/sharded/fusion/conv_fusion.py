"""Fused forward of nn.Sequential: runs of convolutions and ReLUs are computed as one chain (see conv_chain.py).

Such a run shares one wide halo in any case (see wide_halo.py). If no hook or mode can observe the values in between,
the layers need not be called one by one with ShardedTensors, which saves the Python code between two convolutions.

Messages are the same with and without chains, so a rank with a hook on a layer is compatible with ranks without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from torchmn._torch_compat import (
    HOOKS_OF_ALL_MODULES,
    DisableTorchFunction,
    backward_hooks,
    forward_hooks,
    forward_pre_hooks,
    function_modes,
    is_tracing,
    is_transforming,
    own_parameters,
)
from torchmn.context import here
from torchmn.geometry import Interval
from torchmn.sharded.fusion.conv_chain import Box, KeptOutputs, Link, convolve_in_chain
from torchmn.sharded.fusion.onednn_blocks import may_stay_in_blocks
from torchmn.sharded.fusion.wide_convolution import PreparedConvolution, prepare, wide_tile_for
from torchmn.sharded.fusion.wide_halo import Rows, WideTile, wrap_wide
from torchmn.sharded.redistribute import replicated_operand
from torchmn.sharded.saved_buffers import outside
from torchmn.sharded.sharding import Sharding
from torchmn.sharded.tensor import ShardedTensor, wrap

_CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MOST_IN_CHAIN = 8  # so many are looked at from each one on: the search in models with hundreds of them is bounded
# In blocks, rows with wrong values cannot be dropped within the chain: with a halo of 4 beside 32 rows, computing them
# took more time than blocks saved.
_ROWS_PER_HALO_IN_BLOCKS = 16


def fuse_sequentials(model: nn.Module) -> None:
    """Replaces the forward of every nn.Sequential inside of `model` by one that computes chains of convolutions."""
    for module in model.modules():
        if module is not model and type(module) is nn.Sequential and "forward" not in module.__dict__:
            module.forward = _FusedForward(module)


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """Returns the forward of the class of `model`, to be called with the model; the fused one for an nn.Sequential."""
    return _fused_forward if type(model) is nn.Sequential else type(model).forward


class _FusedForward:
    """The fused forward of an nn.Sequential. An object, so that a deep copy of the model copies it too."""

    def __init__(self, sequential: nn.Sequential):
        self.sequential = sequential

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _fused_forward(self.sequential, *args, **kwargs)


def _fused_forward(sequential: nn.Sequential, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or not isinstance(args[0], ShardedTensor) or _must_call_every_layer():
        return nn.Sequential.forward(sequential, *args, **kwargs)
    x, layers, at = args[0], list(_flattened(sequential)), 0
    while at < len(layers):
        begins = type(layers[at]) in _CONVOLUTIONS and isinstance(x, ShardedTensor) and _has_successor(layers, at)
        count, result = _run_chain(layers, at, x) if begins else (0, x)
        x, at = (result, at + count) if count else (layers[at](x), at + 1)
    return x


# -- hooks and modes that must see every layer -------------------------------------------------------------------------


def _must_call_every_layer() -> bool:
    """Whether a hook, mode or tracer must see every layer and every torch function of the model."""
    if here.recorder is not None or any(HOOKS_OF_ALL_MODULES) or is_tracing():
        return True
    return is_transforming() or not all(map(_ignores_convolutions, function_modes()))


def _ignores_convolutions(listener: Any) -> bool:
    """Whether a mode or a hook is one of torchmn that does nothing for convolutions of ShardedTensors."""
    return getattr(listener, "ignores_convolutions", False)


def _has_hooks(layer: nn.Module) -> bool:
    if forward_hooks(layer) or any(backward_hooks(layer)):
        return True
    return not all(map(_ignores_convolutions, forward_pre_hooks(layer).values()))


# -- which layers form a chain -----------------------------------------------------------------------------------------


def _flattened(sequential: Any) -> Iterator[nn.Module]:
    """Yields the layers of a Sequential, and those of Sequentials inside of it."""
    for layer in sequential:
        if isinstance(layer.__dict__.get("forward"), _FusedForward) and not _has_hooks(layer):
            yield from _flattened(layer)
        else:
            yield layer


def _has_successor(layers: Sequence[nn.Module], at: int) -> bool:
    """Whether another convolution follows the convolution `at`, directly or after a ReLU."""
    after = at + 2 if at + 1 < len(layers) and type(layers[at + 1]) is nn.ReLU else at + 1
    return after < len(layers) and type(layers[after]) in _CONVOLUTIONS


class _LayerSettings(NamedTuple):
    """The settings of a convolution layer, and whether a ReLU follows; the key under which a chain is cached."""

    weight: torch.Size
    stride: Any
    padding: Any
    dilation: Any
    groups: int
    relu: bool


_Parameters = tuple[nn.Parameter, nn.Parameter | None]  # weight and bias


def _convolutions(
    layers: Sequence[nn.Module], at: int, x: ShardedTensor
) -> Iterator[tuple[_Parameters, _LayerSettings]]:
    """Yields the convolutions from layer `at` on that may form a chain."""
    dtype, dims = x.dtype, x.dim()
    while at < len(layers) and type(layers[at]) in _CONVOLUTIONS and not _has_hooks(layers[at]):
        layer: Any = layers[at]
        parameters = _parameters(layer, dtype)
        if parameters is None or layer.padding_mode != "zeros" or parameters[0].dim() != dims:
            return
        relu = at + 1 < len(layers) and type(layers[at + 1]) is nn.ReLU and not _has_hooks(layers[at + 1])
        yield (
            parameters,
            _LayerSettings(parameters[0].shape, layer.stride, layer.padding, layer.dilation, layer.groups, relu),
        )
        at += 1 + relu


def _parameters(layer: nn.Module, dtype: torch.dtype) -> _Parameters | None:
    """Returns weight and bias; None if they are not parameters of this dtype, as with a parametrization.

    Read from the layer's dict of parameters: `layer.weight` is slow, because it goes through `Module.__getattr__`.
    """
    registered = own_parameters(layer)
    weight, bias = registered.get("weight"), registered.get("bias")
    if not isinstance(weight, nn.Parameter) or weight.dtype is not dtype or "bias" not in registered:
        return None
    if bias is not None and (not isinstance(bias, nn.Parameter) or bias.dtype is not dtype):
        return None
    return weight, bias


class _Chain(NamedTuple):
    """The integers of a chain, computed once for all steps. `width`, `margin`: of the result, as in `WideTile`."""

    links: tuple[Link, ...]
    result: Sharding
    width: Rows
    margin: Rows


def _run_chain(layers: Sequence[nn.Module], at: int, x: ShardedTensor) -> tuple[int, Any]:
    """Returns how many layers from `at` on form a chain, and their result for `x`; (0, x) if there is none."""
    with DisableTorchFunction():  # torch functions compute with the shards
        found = list(islice(_convolutions(layers, at, x), _MOST_IN_CHAIN))
        layout, settings_of_all = x.spec, tuple([settings for _, settings in found])
        if len(found) < 2 or not layout.is_tile or torch.is_autocast_enabled(x.device.type):
            return 0, x
        first = settings_of_all[0]
        reach = prepare(layout, first.weight, first.stride, first.padding, first.dilation).reach
        wide = wide_tile_for(x, found[0][0][0], reach)
        if wide is None:
            return 0, x
        in_blocks = may_stay_in_blocks(wide.tensor, [weight for (weight, _), _ in found])
        key = (_chain, wide.width, wide.margin, settings_of_all, in_blocks)
        chain = layout.cache.get(key)
        if chain is None:
            chain = layout.cache[key] = _chain(layout, wide, settings_of_all, in_blocks)
        found = found[: len(chain.links)]
        count = sum(1 + settings.relu for _, settings in found)
        return count, _compute(wide, chain, [parameters for parameters, _ in found])


def _chain(layout: Sharding, wide: WideTile, settings_of_all: Sequence[_LayerSettings], in_blocks: bool) -> _Chain:
    """Returns the chain of as many of these convolutions as the margin suffices for: at least the first one."""
    links: list[Link] = []
    width, margin, image = wide.width, wide.margin, layout
    prepared_all = _prepared_convolutions(layout, wide.margin, settings_of_all)
    in_blocks = in_blocks and _tile_is_large(layout, width)
    for number, (prepared, settings) in enumerate(zip(prepared_all, settings_of_all, strict=False), start=1):
        assert prepared.reach is not None
        margin = tuple(have - need for have, need in zip(margin, prepared.reach, strict=True))
        image, kept, stays = prepared.result, None, in_blocks and number < len(prepared_all)
        if not stays and _is_worth_dropping(width, margin):
            kept, width = _kept_outputs(image, width, margin), margin
        links.append(
            Link(prepared.stride, prepared.padding, prepared.dilation, settings.groups, settings.relu, kept, stays)
        )
    return _Chain(tuple(links), image, width, margin)


def _prepared_convolutions(
    image: Sharding, margin: Rows, settings_of_all: Sequence[_LayerSettings]
) -> list[PreparedConvolution]:
    """Returns the integers of the first of these convolutions, as many as the margin suffices for."""
    prepared_all: list[PreparedConvolution] = []
    for settings in settings_of_all:
        prepared = prepare(image, settings.weight, settings.stride, settings.padding, settings.dilation)
        if prepared.reach is None or any(have < need for have, need in zip(margin, prepared.reach, strict=True)):
            break
        margin = tuple(have - need for have, need in zip(margin, prepared.reach, strict=True))
        prepared_all.append(prepared)
        image = prepared.result
    return prepared_all


def _tile_is_large(layout: Sharding, width: Rows) -> bool:
    """Whether the tile has so many rows that computing the halo with it costs little."""
    dims = enumerate(width, len(layout.shape) - len(width))
    return all(rows * _ROWS_PER_HALO_IN_BLOCKS <= len(layout.interval(dim)) for dim, rows in dims)


def _is_worth_dropping(width: Rows, margin: Rows) -> bool:
    """Whether to drop the rows with wrong values: if there are several, or no others are left.

    A single row costs the next convolution less time than dropping it.
    """
    wrong = [all_ - right for all_, right in zip(width, margin, strict=True)]
    return max(wrong) > 1 or (any(wrong) and not any(margin))


def _kept_outputs(image: Sharding, width: Rows, left: Rows) -> KeptOutputs:
    """Returns the box of the tile with `left` rows of halo, inside the tile with `width` rows."""
    first = len(image.shape) - len(width)
    outer = [_with_rows(image, dim, rows) for dim, rows in enumerate(width, first)]
    inner = [_with_rows(image, dim, rows) for dim, rows in enumerate(left, first)]
    places = [inside.shift(-around.start) for around, inside in zip(outer, inner, strict=True)]
    shape = tuple(len(interval) for interval in outer)
    rest = tuple(_box(box, shape, first) for box in outside(shape, places))
    return KeptOutputs(shape, _box(places, shape, first), rest)


def _box(places: Sequence[Interval], shape: Sequence[int], first: int) -> Box:
    """Returns the arguments of `narrow` that select these places of the dims from `first` on, of extents `shape`."""
    dims = enumerate(zip(places, shape, strict=True), first)
    return tuple((dim, place.start, len(place)) for dim, (place, extent) in dims if len(place) < extent)


def _with_rows(image: Sharding, dim: int, rows: int) -> Interval:
    owned = image.interval(dim)
    return Interval(max(0, owned.start - rows), min(image.shape[dim], owned.stop + rows))


def _compute(wide: WideTile, chain: _Chain, pairs: Sequence[_Parameters]) -> ShardedTensor:
    layout = chain.result
    parameters = [None if tensor is None else replicated_operand(tensor, layout) for pair in pairs for tensor in pair]
    y = convolve_in_chain(wide.tensor, chain.links, parameters)
    return wrap_wide(y, layout, chain.width, chain.margin) if any(chain.width) else wrap(y, layout)
