"""Runs of convolutions inside an nn.Sequential, computed in one go.

Such a run shares one wide halo anyway (see wide.py). Where nobody can look in between, its layers need not be called
one by one with ShardedTensors, and there is no Python between two convolutions, where it is slowest.

What travels is what travels without chains: a rank that watches a layer with a hook fits to others that do not.
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
from torchmn.sharded.fusion.blocks import may_stay_in_blocks
from torchmn.sharded.fusion.chain import Box, Kept, Link, convolve_in_chain
from torchmn.sharded.fusion.wide import Reach, Wide, wide_part
from torchmn.sharded.fusion.wide_convolution import Prepared, prepared, wide_enough
from torchmn.sharded.redistribute import entering
from torchmn.sharded.saved_buffers import outside
from torchmn.sharded.sharding import Sharding
from torchmn.sharded.tensor import ShardedTensor, wrap

_CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MOST_IN_CHAIN = 16  # of hundreds of convolutions, one need not look at all that follow
# From blocks no rows can be dropped half-way: with a halo of 4 beside 32 rows, that cost more than blocks gained.
_ROWS_PER_HALO_IN_BLOCKS = 16


def run_in_chains(model: nn.Module) -> None:
    """Let every nn.Sequential inside of `model` compute what it can in chains."""
    for module in model.modules():
        if module is not model and type(module) is nn.Sequential and "forward" not in module.__dict__:
            module.forward = _InChains(module)  # type: ignore[assignment]


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """The forward of the class of `model`, which takes the model first; in chains, if it is an nn.Sequential."""
    return _forward_in_chains if type(model) is nn.Sequential else type(model).forward


class _InChains:
    """The forward of an nn.Sequential; an object, so that a deep copy of the model has its own."""

    def __init__(self, sequential: nn.Module):
        self.sequential = sequential

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _forward_in_chains(self.sequential, *args, **kwargs)


def _forward_in_chains(sequential: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or not isinstance(args[0], ShardedTensor) or _is_somebody_listening():
        return nn.Sequential.forward(sequential, *args, **kwargs)  # type: ignore[arg-type]
    x, layers, at = args[0], list(_flattened(sequential)), 0
    while at < len(layers):
        begins = isinstance(x, ShardedTensor) and type(layers[at]) in _CONVOLUTIONS
        taken, done = _chained(layers, at, x) if begins else (0, x)
        x, at = (done, at + taken) if taken else (layers[at](x), at + 1)
    return x


# -- who must not be left out ------------------------------------------------------------------------------------------


def _is_somebody_listening() -> bool:
    """Whether every layer and every torch function must be called as the model says."""
    if here.recorder is not None or any(HOOKS_OF_ALL_MODULES) or is_tracing():
        return True
    return is_transforming() or not all(map(_is_ours, function_modes()))


def _is_ours(listener: Any) -> bool:
    """Whether a mode or a hook is one of this package's that has nothing to do with convolutions of ShardedTensors."""
    return getattr(listener, "ignores_convolutions", False)


def _is_watched(layer: nn.Module) -> bool:
    if forward_hooks(layer) or any(backward_hooks(layer)):
        return True
    return not all(map(_is_ours, forward_pre_hooks(layer).values()))


# -- which layers are a chain ------------------------------------------------------------------------------------------


def _flattened(sequential: Any) -> Iterator[nn.Module]:
    """The layers of a Sequential, in place of Sequentials inside of it their layers."""
    for layer in sequential:
        if isinstance(layer.__dict__.get("forward"), _InChains) and not _is_watched(layer):
            yield from _flattened(layer)
        else:
            yield layer


class _Settings(NamedTuple):
    """What the answer of a convolution depends on, besides numbers; and whether a ReLU follows."""

    weight: torch.Size
    stride: Any
    padding: Any
    dilation: Any
    groups: int
    relu: bool


_Parameters = tuple[nn.Parameter, nn.Parameter | None]  # weight and bias


def _convolutions(layers: Sequence[nn.Module], at: int, x: ShardedTensor) -> Iterator[tuple[_Parameters, _Settings]]:
    """The convolutions from there on that may follow one another in a chain."""
    dtype, dims = x.dtype, x.dim()
    while at < len(layers) and type(layers[at]) in _CONVOLUTIONS and not _is_watched(layers[at]):
        layer: Any = layers[at]
        parameters = _parameters(layer, dtype)
        if parameters is None or layer.padding_mode != "zeros" or parameters[0].dim() != dims:
            return
        relu = at + 1 < len(layers) and type(layers[at + 1]) is nn.ReLU and not _is_watched(layers[at + 1])
        yield (
            parameters,
            _Settings(parameters[0].shape, layer.stride, layer.padding, layer.dilation, layer.groups, relu),
        )
        at += 1 + relu


def _parameters(layer: nn.Module, dtype: torch.dtype) -> _Parameters | None:
    """Weight and bias, from where they are kept: `layer.weight` searches for it, at every step of every layer.

    None if they are something else than parameters of this dtype, because something puts them together.
    """
    kept = own_parameters(layer)
    weight, bias = kept.get("weight"), kept.get("bias")
    if not isinstance(weight, nn.Parameter) or weight.dtype is not dtype or "bias" not in kept:
        return None
    if bias is not None and (not isinstance(bias, nn.Parameter) or bias.dtype is not dtype):
        return None
    return weight, bias


class _Chain(NamedTuple):
    """Convolutions that are computed together, worked out from integers: once, for all steps."""

    links: tuple[Link, ...]
    result: Sharding
    width: Reach  # how many rows lie around the result
    margin: Reach  # and how many of these hold right values


def _chained(layers: Sequence[nn.Module], at: int, x: ShardedTensor) -> tuple[int, Any]:
    """How many layers from there on are a chain, and what they make of `x`; 0 where none begins."""
    with DisableTorchFunction():  # what follows computes with what ShardedTensors hold
        found = list(islice(_convolutions(layers, at, x), _MOST_IN_CHAIN))
        layout, said = x.spec, tuple([settings for _, settings in found])
        if len(found) < 2 or not layout.is_tile or torch.is_autocast_enabled(x.device.type):
            return 0, x
        first = said[0]
        reach = prepared(layout, first.weight, first.stride, first.padding, first.dilation).reach
        wide = wide_enough(x, found[0][0][0], reach)
        if wide is None:
            return 0, x
        in_blocks = may_stay_in_blocks(wide.tensor, [weight for (weight, _), _ in found])
        key = (_chain, wide.width, wide.margin, said, in_blocks)
        chain = layout.worked_out.get(key)
        if chain is None:
            chain = layout.worked_out[key] = _chain(layout, wide, said, in_blocks)
        found = found[: len(chain.links)]
        taken = sum(1 + settings.relu for _, settings in found)
        return taken, _computed(wide, chain, [parameters for parameters, _ in found])


def _chain(layout: Sharding, wide: Wide, said: Sequence[_Settings], in_blocks: bool) -> _Chain:
    """As many of these convolutions as find right values around the tile; the first one does."""
    links: list[Link] = []
    width, margin, image = wide.width, wide.margin, layout
    works = _works(layout, wide.margin, said)
    in_blocks = in_blocks and _is_narrow(layout, width)
    for number, (work, settings) in enumerate(zip(works, said, strict=False), start=1):
        assert work.reach is not None
        margin = tuple(have - need for have, need in zip(margin, work.reach, strict=True))
        image, kept, stays = work.result, None, in_blocks and number < len(works)
        if not stays and _is_worth_dropping(width, margin):
            kept, width = _kept(image, width, margin), margin
        links.append(Link(work.stride, work.padding, work.dilation, settings.groups, settings.relu, kept, stays))
    return _Chain(tuple(links), image, width, margin)


def _works(image: Sharding, margin: Reach, said: Sequence[_Settings]) -> list[Prepared]:
    """What the first of these convolutions come to, as long as there are right values around the tile."""
    works: list[Prepared] = []
    for settings in said:
        work = prepared(image, settings.weight, settings.stride, settings.padding, settings.dilation)
        if work.reach is None or any(have < need for have, need in zip(margin, work.reach, strict=True)):
            break
        margin = tuple(have - need for have, need in zip(margin, work.reach, strict=True))
        works.append(work)
        image = work.result
    return works


def _is_narrow(layout: Sharding, width: Reach) -> bool:
    """Whether the tile has so many rows that a few around it cost little."""
    dims = enumerate(width, len(layout.shape) - len(width))
    return all(rows * _ROWS_PER_HALO_IN_BLOCKS <= len(layout.interval(dim)) for dim, rows in dims)


def _is_worth_dropping(width: Reach, margin: Reach) -> bool:
    """Whether to go on without the rows that are not right any more: at the end, and where there are several.

    One row costs the next convolution less than it costs to drop it.
    """
    wrong = [all_ - right for all_, right in zip(width, margin, strict=True)]
    return max(wrong) > 1 or (any(wrong) and not any(margin))


def _kept(image: Sharding, width: Reach, left: Reach) -> Kept:
    """The tile with `left` rows around it, in one with `width` rows."""
    first = len(image.shape) - len(width)
    whole = [_around(image, dim, rows) for dim, rows in enumerate(width, first)]
    inner = [_around(image, dim, rows) for dim, rows in enumerate(left, first)]
    places = [part.shift(-all_.start) for all_, part in zip(whole, inner, strict=True)]
    shape = tuple(len(interval) for interval in whole)
    return Kept(shape, _box(places, shape, first), tuple(_box(box, shape, first) for box in outside(shape, places)))


def _box(places: Sequence[Interval], shape: Sequence[int], first: int) -> Box:
    """How to narrow a tensor whose dims from `first` on have `shape` to these places."""
    dims = enumerate(zip(places, shape, strict=True), first)
    return tuple((dim, place.start, len(place)) for dim, (place, extent) in dims if len(place) < extent)


def _around(image: Sharding, dim: int, rows: int) -> Interval:
    own = image.interval(dim)
    return Interval(max(0, own.start - rows), min(image.shape[dim], own.stop + rows))


def _computed(wide: Wide, chain: _Chain, pairs: Sequence[_Parameters]) -> ShardedTensor:
    layout = chain.result
    parameters = [None if tensor is None else entering(tensor, layout) for pair in pairs for tensor in pair]
    y = convolve_in_chain(wide.tensor, chain.links, parameters)
    return wide_part(y, layout, chain.width, chain.margin) if any(chain.width) else wrap(y, layout)
