"""Functions of windows (convolutions, pools, padding): a halo exchange, then the local computation of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from torchmn.geometry import DimPlan, Interval, Window, all_owned
from torchmn.sharded.exchange import fetch, image_cut
from torchmn.sharded.redistribute import gathered
from torchmn.sharded.refusals import refuse, where
from torchmn.sharded.registry import RULES, AnyRule, functions_named
from torchmn.sharded.saved_buffers import saved_as_tile
from torchmn.sharded.sharding import AnyCut, Cut, Sharding
from torchmn.sharded.tensor import ShardedTensor, wrap


class WindowPlan(NamedTuple):
    """The halo exchange of a function of windows, and its result.

    Attributes:
        dims: for each of the last dims of the input, which indices each place needs.
        result: the sharding of the outputs, cut evenly along the axes of the input.
    """

    dims: list[DimPlan]
    result: Sharding


def plan_windows(
    spec: Sharding, windows: Sequence[Window], channels: int | None = None, padding_mode: str = "zeros"
) -> WindowPlan:
    """Returns the plan of a function each of whose outputs depends on a window of the last dims.

    Args:
        spec: the sharding of the input.
        windows: one per dim.
        channels: of the outputs; those of the input by default.
        padding_mode: as of `nn.Conv2d`.
    """
    key = (plan_windows, tuple(windows), channels, padding_mode)
    known = spec.cache.get(key)
    if known is None:
        known = spec.cache[key] = _plan_windows(spec, windows, channels, padding_mode)
    return known


def _plan_windows(spec: Sharding, windows: Sequence[Window], channels: int | None, padding_mode: str) -> WindowPlan:
    first = len(spec.shape) - len(windows)
    extents = [window.output_extent(extent) for window, extent in zip(windows, spec.shape[first:], strict=True)]
    dims = []
    for dim, window in enumerate(windows, start=first):
        try:
            dims.append(DimPlan.of_window(spec.shape[dim], _places(spec, dim), window, padding_mode))
        except Exception as error:
            raise type(error)(f"{where()}: {error}") from None
    return WindowPlan(dims, _outputs(spec, extents, channels))


def plan_needs(
    spec: Sharding,
    extents: Sequence[int],
    needed: Callable[[int, Interval], Interval],
    channels: int | None = None,
    padding_mode: str = "zeros",
) -> WindowPlan:
    """Returns the plan of a function whose windows are not regular, such as interpolation.

    Args:
        spec: the sharding of the input.
        extents: of the last dims of the outputs.
        needed: called with the number of a dim, counted from the first of these, and an interval of outputs; returns
            the inputs that they depend on.
        channels: of the outputs; those of the input by default.
        padding_mode: as of `nn.Conv2d`.
    """
    first = len(spec.shape) - len(extents)
    dims = []
    for number, extent in enumerate(extents):
        places, whole = _places(spec, first + number), spec.shape[first + number]
        needs = tuple(needed(number, outputs) if outputs else Interval(0, 0) for outputs in all_owned(extent, places))
        dims.append(DimPlan(whole, all_owned(whole, places), needs, padding_mode))
    return WindowPlan(dims, _outputs(spec, extents, channels))


def windowed(
    x: ShardedTensor,
    plan: WindowPlan,
    compute: Callable[[Tensor], Tensor],
    *parameters: Tensor | None,
    fill: float = 0.0,
) -> ShardedTensor:
    """Returns the outputs that `compute` gives for this rank's tile with its halo and padding.

    Args:
        x: the image in tiles.
        plan: what the outputs need.
        compute: maps the plain tensor of tile, halo and padding to this rank's outputs, of shape
            `plan.result.local_shape()`. It is not called on a rank without outputs.
        parameters: the parameters that `compute` uses. Autograd must reach them on a rank without outputs too.
        fill: the value of padding.
    """
    buffer, shape = fetch(x, plan.dims, fill), plan.result.local_shape()
    if 0 in shape:
        return wrap(empty_with_graph(shape, buffer, *parameters), plan.result)
    with saved_as_tile(x, buffer, plan.dims):
        return wrap(compute(buffer), plan.result)


def _outputs(spec: Sharding, extents: Sequence[int], channels: int | None) -> Sharding:
    """Returns the sharding of outputs whose last dims have `extents`."""
    first = len(spec.shape) - len(extents)
    shape, cuts = list(spec.shape), list(spec.cuts)
    if channels is not None:
        shape[1], cuts[1] = channels, None
    for dim, extent in enumerate(extents, start=first):
        shape[dim], cuts[dim] = extent, _balanced(spec.cuts[dim], extent)
    return spec.with_dims(tuple(shape), tuple(cuts))


def _balanced(cut: AnyCut, extent: int) -> AnyCut:
    if cut is None:
        return None
    return Cut.balanced(image_cut(cut).axis, extent, len(image_cut(cut).intervals))


def _places(spec: Sharding, dim: int) -> int:
    cut = spec.cuts[dim]
    return 1 if cut is None else len(image_cut(cut).intervals)


def empty_with_graph(shape: Sequence[int], *sources: Tensor | None) -> Tensor:
    """Returns a tensor without elements that depends on its sources in the graph.

    A rank without outputs must take part in the backward exchange of the other ranks.
    """
    first, *rest = (x for x in sources if x is not None)
    zero = first.sum() * 0
    for x in rest:
        zero = zero * x.sum() + x.sum() * 0  # a product, so that second derivatives depend on every source too
    return zero.expand(tuple(shape)).clone()  # not a view: ReLU(inplace=True) may follow


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
