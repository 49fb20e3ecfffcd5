"""The stacks of a sparse autoencoder on tiles, with one halo exchange per stack.

Each rank holds the filters of its tile's outputs, so these outputs must be exchanged. Pooling and normalisation have no
parameters: from a wide halo of outputs, a rank computes all inputs of its filters in the next stack, including border
rows of its neighbours. That is faster than an exchange after each layer.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from torchmn._torch_compat import DisableTorchFunction, backward_hooks, forward_hooks
from torchmn.geometry import DimPlan, HaloPlan, Interval, all_owned
from torchmn.models.sparse_autoencoder.tile_features import TileSteps, tile_features
from torchmn.nn.local_filters.contrast_norm import LocalContrastNorm2d
from torchmn.nn.local_filters.contrast_region import Normalisation
from torchmn.nn.local_filters.field_grid import FieldGrid
from torchmn.nn.local_filters.l2_pool import L2Pool2d
from torchmn.nn.local_filters.local_filter import TiledLocalFilter2d
from torchmn.nn.local_filters.window_sums import Windows
from torchmn.sharded.sharding import Sharding, image_layout
from torchmn.sharded.tensor import ShardedTensor, local, wrap

if TYPE_CHECKING:
    from torchmn.models.sparse_autoencoder.model import SparseAutoencoder, Stack

Pair = tuple[int, int]
Cuts = tuple[tuple[Interval, ...], tuple[Interval, ...]]  # along height and width, the interval of each place


def runs_on_tiles(model: SparseAutoencoder, x: ShardedTensor) -> bool:
    """Whether all layers are those of this package, without hooks, and every rank has a tile of each output."""
    if local(x).is_meta or x.shape[0] == 0:
        return False
    if not all(_is_plain(stack) for stack in model.stacks):
        return False
    parts = filters_of(model.stacks[0]).grid.parts_of(2)
    smallest = pooled_size(model.stacks[-1])  # no padding: sizes only fall
    return smallest[0] >= parts[0] and smallest[1] >= parts[1]


def inputs_with_halo(model: SparseAutoencoder, x: ShardedTensor, number: int) -> Tensor:
    """Returns the inputs of this rank's filters in stack `number`: (batch, map, height, width), batch last in memory.

    Args:
        model: the network.
        x: the images in tiles.
        number: of the stack, counted from 0.
    """
    first = filters_of(model.stacks[0])
    first.check_shape(x, "forward", (first.in_maps, *first.in_size))
    with DisableTorchFunction():
        buffer = first.fetched(local(x))
        for stack, above in pairwise(model.stacks[: number + 1]):
            dims = filters_of(above).array.plan.dims
            buffer = _features(stack, buffer, (dims[0].needed, dims[1].needed))
    return buffer


def features(model: SparseAutoencoder, x: ShardedTensor, stacks: int) -> ShardedTensor:
    """Returns the sharded outputs of the first `stacks` stacks for images in tiles."""
    last = model.stacks[stacks - 1]
    grid = filters_of(last).grid
    buffer = inputs_with_halo(model, x, stacks - 1)
    maps, (height, width) = last.filter.out_maps, pooled_size(last)
    layout: Sharding = image_layout(grid, (x.shape[0], maps, height, width), x.spec.samples)
    parts = grid.parts_of(2)
    with DisableTorchFunction():
        tile = _features(last, buffer, (all_owned(height, parts[0]), all_owned(width, parts[1])))
    return wrap(tile, layout)


def pooled_size(stack: Stack) -> tuple[int, int]:
    """Returns (height, width) of a stack's features."""
    height, width = (
        (n - k) // s + 1 for n, k, s in zip(stack.filter.out_size, stack.pool.kernel, stack.pool.stride, strict=True)
    )
    return height, width


def filters_of(stack: Stack) -> TiledLocalFilter2d:
    """Returns the stack's filters, which are those of this rank's tile."""
    return cast(TiledLocalFilter2d, stack.filter)


def _features(stack: Stack, buffer: Tensor, wanted: Cuts) -> Tensor:
    """Returns the outputs of a stack in the intervals `wanted` of this rank, from the inputs of its filters."""
    filters = filters_of(stack)
    field_grid = FieldGrid((buffer.shape[2], buffer.shape[3]), filters.kernel, filters.stride)
    return tile_features(buffer, filters.weight, field_grid, stack.pool.eps, _steps(stack, wanted), filters.grid.tiles)


def _steps(stack: Stack, wanted: Cuts) -> TileSteps:
    grid, pool, norm = filters_of(stack).grid, stack.pool, stack.norm
    parts, place = grid.parts_of(2), grid.place_of(2)
    height, width = pooled_size(stack)
    region = norm.region((height, width), (wanted[0][place[0]], wanted[1][place[1]]))
    around = norm.kernel[0] // 2 * 2, norm.kernel[1] // 2 * 2
    return _planned(stack.filter.out_size, parts, place, (pool.kernel, pool.stride), around, wanted, region)


@lru_cache(maxsize=256)
def _planned(
    size, parts, place, pool: tuple[Pair, Pair], around: Pair, wanted: Cuts, region: Normalisation
) -> TileSteps:
    dims = []
    for extent, count, kernel, stride, reach, cut in zip(size, parts, *pool, around, wanted, strict=True):
        after = (extent - kernel) // stride + 1
        inputs = [Interval(max(0, one.start - reach), min(after, one.stop + reach)) for one in cut]
        needed = tuple(Interval(one.start * stride, (one.stop - 1) * stride + kernel) for one in inputs)
        dims.append(DimPlan(extent, all_owned(extent, count), needed))
    plan = HaloPlan.of(tuple(dims), place)
    height, width = plan.buffer_shape
    return TileSteps(plan, Windows((height, width), *pool), region)


def _is_plain(stack: Stack) -> bool:
    filters, pool, norm = stack.filter, stack.pool, stack.norm
    return (
        type(filters) is TiledLocalFilter2d
        and filters.bias is None
        and (filters.padding, filters.stride) == ((0, 0), (1, 1))
        and type(pool) is L2Pool2d
        and pool.padding == (0, 0)
        and type(norm) is LocalContrastNorm2d
        and norm.gaussian is not None
        and not any(_has_hooks(module) for module in (stack, filters, pool, norm))
    )


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks; then each layer must be called."""
    return bool(forward_hooks(module)) or any(backward_hooks(module))
