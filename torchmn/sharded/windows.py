"""Functions of windows: what this rank needs for its outputs is fetched, and they are computed from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from torchmn.geometry import DimPlan, Interval, Window, all_owned
from torchmn.sharded.exchange import fetch, image_cut
from torchmn.sharded.refusals import where
from torchmn.sharded.saved_buffers import remembered_as_tile
from torchmn.sharded.sharding import AnyCut, Cut, Sharding
from torchmn.sharded.tensor import ShardedTensor, wrap


class WindowPlan(NamedTuple):
    """What the outputs of a function need, worked out from integers.

    Attributes:
        dims: a plan for each of the last dims of the input.
        result: the sharding of the outputs: balanced, along the axes of the input.
    """

    dims: list[DimPlan]
    result: Sharding


def plan_windows(
    spec: Sharding, windows: Sequence[Window], channels: int | None = None, padding_mode: str = "zeros"
) -> WindowPlan:
    """Returns the plan of a function whose outputs see these windows of the last dims.

    Args:
        spec: of the input.
        channels: of the outputs, if not those of the input.
    """
    key = (plan_windows, tuple(windows), channels, padding_mode)
    known = spec.worked_out.get(key)
    if known is None:
        known = spec.worked_out[key] = _plan_windows(spec, windows, channels, padding_mode)
    return known


def _plan_windows(spec: Sharding, windows: Sequence[Window], channels: int | None, padding_mode: str) -> WindowPlan:
    behind = len(spec.shape) - len(windows)
    extents = [window.output_extent(extent) for window, extent in zip(windows, spec.shape[behind:], strict=True)]
    dims = []
    for dim, window in enumerate(windows, start=behind):
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
    """Returns the plan of a function with outputs of `extents`, which need `needed(number, outputs)` of dim `number`.

    Dims are counted from the first of the last `len(extents)`.
    """
    behind = len(spec.shape) - len(extents)
    dims = []
    for number, extent in enumerate(extents):
        places, whole = _places(spec, behind + number), spec.shape[behind + number]
        needs = tuple(needed(number, mine) if mine else Interval(0, 0) for mine in all_owned(extent, places))
        dims.append(DimPlan(whole, all_owned(whole, places), needs, padding_mode))
    return WindowPlan(dims, _outputs(spec, extents, channels))


def windowed(
    x: ShardedTensor,
    plan: WindowPlan,
    compute: Callable[[Tensor], Tensor],
    *parameters: Tensor | None,
    fill: float = 0.0,
) -> ShardedTensor:
    """Returns what `compute` makes of this rank's tile with its halo and padding.

    Backward needs no second copy of the tile: the buffer is made again from it.

    Args:
        compute: plain tensor to plain tensor, of the shape that `plan.result` says. It is not called on a rank without
            outputs.
        parameters: what else `compute` uses and autograd must reach on a rank without outputs, too.
        fill: the value of padding.
    """
    buffer, shape = fetch(x, plan.dims, fill), plan.result.local_shape()
    if 0 in shape:
        return wrap(nothing(shape, buffer, *parameters), plan.result)
    with remembered_as_tile(x, buffer, plan.dims):
        return wrap(compute(buffer), plan.result)


def _outputs(spec: Sharding, extents: Sequence[int], channels: int | None) -> Sharding:
    """The sharding of outputs whose last dims have `extents`."""
    behind = len(spec.shape) - len(extents)
    shape, cuts = list(spec.shape), list(spec.cuts)
    if channels is not None:
        shape[1], cuts[1] = channels, None
    for dim, extent in enumerate(extents, start=behind):
        shape[dim], cuts[dim] = extent, _balanced(spec.cuts[dim], extent)
    return spec.with_dims(tuple(shape), tuple(cuts))


def _balanced(cut: AnyCut, extent: int) -> AnyCut:
    if cut is None:
        return None
    return Cut.balanced(image_cut(cut).axis, extent, len(image_cut(cut).intervals))


def _places(spec: Sharding, dim: int) -> int:
    cut = spec.cuts[dim]
    return 1 if cut is None else len(image_cut(cut).intervals)


def nothing(shape: Sequence[int], *sources: Tensor | None) -> Tensor:
    """An empty tensor of `shape` that still hangs on its sources in the graph.

    A rank without outputs must take part in the backward exchange of the others.
    """
    first, *rest = (x for x in sources if x is not None)
    # A product, so that second derivatives hang on every source, too.
    zero = first.sum() * 0
    for x in rest:
        zero = zero * x.sum() + x.sum() * 0
    return zero.expand(tuple(shape)).clone()  # memory of its own: ReLU(inplace=True) may follow
