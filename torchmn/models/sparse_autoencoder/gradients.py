"""gradients: the pretraining cost of a stack and the gradients of its filters, in closed form.

The cost ½‖x̂ - x‖² + λ·Σ pooled is quadratic in the decoder: with y = Wx, x̂ = Dᵀy and e = x̂ - x, the gradients are e·y
of the decoder and x·(De + λ∂p/∂y) of the encoder. On tiles, the parts of x̂ that neighbours decode are added to it, in
the halo too (`OverlapAdd`). Pooled outputs whose window is in two tiles are computed on both ranks.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.functions.halo.exchange import halo_exchange, halo_scatter_add, start_halo_exchange
from torchmn.geometry import DimPlan, HaloPlan, Interval, all_owned
from torchmn.models.sparse_autoencoder.model import Stack
from torchmn.models.sparse_autoencoder.overlapped_outputs import OverlappedOutputs
from torchmn.nn.local_filters.batch_last import over_all_dims, pixels
from torchmn.nn.local_filters.field_grid import FieldGrid
from torchmn.nn.local_filters.l2_pool import L2Pool2d, norms_of
from torchmn.nn.local_filters.local_filter import TiledLocalFilter2d, by_pixel, from_by_pixel
from torchmn.nn.local_filters.receptive_fields import decoded, filters_of, outputs
from torchmn.nn.local_filters.window_sums import Windows, room_for_spreading, spread_of

Pair = tuple[int, int]
Box = tuple[slice, slice]
EVERYTHING: Box = slice(None), slice(None)


def has_closed_form(stack: Stack) -> bool:
    """Whether `gradients` supports the stack: L2 pooling, no bias, no padding, stride 1."""
    filters, pool = stack.filter, stack.pool
    settings = (filters.padding, filters.stride, pool.padding, pool.stride)
    return isinstance(pool, L2Pool2d) and filters.bias is None and settings == ((0, 0), (1, 1), (0, 0), (1, 1))


class Gradients(NamedTuple):
    """This rank's contributions to the cost, and the gradients of its filters.

    Attributes:
        reconstruction: ½‖x̂ - x‖², 0-d.
        pooled: Σ pooled, 0-d.
        decoder, encoder: gradients, of the shape of the filters.
    """

    reconstruction: Tensor
    pooled: Tensor
    decoder: Tensor
    encoder: Tensor


@torch.no_grad()
def gradients(stack: Stack, x: Tensor, sparsity: float) -> Gradients:
    """Returns cost and gradients of ½‖x̂ - x‖² + `sparsity` · Σ pooled, summed over the batch.

    Args:
        stack: its filters and pooling.
        x: (batch, map, height, width), the inputs of this rank's filters, with halo, in memory with the batch last.
        sparsity: λ.
    """
    filters = stack.filter
    encoder, decoder = by_pixel(filters.weight), by_pixel(filters.decoding_weight(None))
    image = pixels(x)
    field_grid = FieldGrid((x.shape[2], x.shape[3]), filters.kernel, filters.stride)
    if isinstance(filters, TiledLocalFilter2d):
        # Each exchange overlaps with a computation, and ends before the next one starts.
        plan, grid = filters.array.plan, filters.grid
        pool_plan, counted = _pooling_plan(filters.out_size, grid.parts_of(2), grid.place_of(2), stack.pool.kernel)
        exchanged = OverlappedOutputs(image, encoder, field_grid, pool_plan, grid.tiles)
        y = exchanged.owned
        image_hat = decoded(y, decoder, field_grid)
        y_with_halo = exchanged.with_halo()
        overlap_add = OverlapAdd(image_hat, plan, grid.tiles)
        total, slopes = _pooling(stack.pool, y_with_halo, _owned_box(pool_plan), counted)
        error = overlap_add.sum_().sub_(image)
        owned_error = error[_owned_box(plan)]
    else:
        y = outputs(image, encoder, field_grid)
        owned_error = error = decoded(y, decoder, field_grid).sub_(image)
        total, slopes = _pooling(stack.pool, y, EVERYTHING, EVERYTHING)
    y_gradient = outputs(error, decoder, field_grid).add_(slopes, alpha=sparsity)
    return Gradients(
        torch.dot(owned_error.reshape(-1), owned_error.reshape(-1)) / 2,
        total,
        from_by_pixel(filters_of(error, y, field_grid)),
        from_by_pixel(filters_of(image, y_gradient, field_grid)),
    )


def _pooling(pool: L2Pool2d, y: Tensor, owned: Box, counted: Box) -> tuple[Tensor, Tensor]:
    """Returns the sum of this rank's pooled values, and the gradient of the sum over all ranks.

    Args:
        y: (height, width, map, batch), the outputs of filters in all windows that contain outputs of this rank.
        owned: which of them are this rank's outputs.
        counted: which pooled values belong to this rank.
    """
    windows = Windows((y.shape[0], y.shape[1]), pool.kernel, pool.stride)
    norms = norms_of(y, windows, pool.eps)
    total = norms[counted].sum()
    field, inverse = room_for_spreading(norms, windows)
    torch.reciprocal(torch.threshold_(norms, 0.0, torch.inf), out=inverse)
    return total, spread_of(field, windows)[owned].mul_(y[owned])


@lru_cache(maxsize=256)
def _pooling_plan(size: Pair, parts: Pair, place: Pair, kernel: Pair) -> tuple[HaloPlan, Box]:
    """Returns the halo for all pooled values that depend on a rank's outputs, and those whose window begins there."""
    dims, counted = [], []
    for extent, count, at, length in zip(size, parts, place, kernel, strict=True):
        owned, windows = all_owned(extent, count), extent - length + 1
        needed = tuple(Interval(max(0, one.start - length + 1), min(extent, one.stop + length - 1)) for one in owned)
        dims.append(DimPlan(extent, owned, needed))
        first, last = min(windows, owned[at].start), min(windows, owned[at].stop)
        counted.append(slice(first - needed[at].start, last - needed[at].start))
    return HaloPlan.of(tuple(dims), place), (counted[0], counted[1])


def _owned_box(plan: HaloPlan) -> Box:
    """Returns the box of a rank's own pixels in its buffer."""
    rows, columns = (
        dim.owned[at].shift(-dim.needed[at].start).as_slice() for dim, at in zip(plan.dims, plan.place, strict=True)
    )
    return rows, columns


class OverlapAdd:
    """Adds up images whose pixels overlap between ranks; starts sending when it is created. Not differentiable.

    Args:
        image: (height, width, map, batch), this rank's contribution to the pixels of its buffer (tile and halo).
        plan: the halo plan of (height, width), which determines the buffers.
        comm: the ranks of the tiles.
    """

    def __init__(self, image: Tensor, plan: HaloPlan, comm: Communicator) -> None:
        self._image, self._comm = image, comm
        self._all_dims = over_all_dims(plan, *image.shape[2:])
        overlaps = _overlap_plan(plan)
        self._overlaps = over_all_dims(overlaps, *image.shape[2:]) if overlaps else None
        if self._overlaps is not None:
            self._started = start_halo_exchange(image, self._overlaps, comm)

    def sum_(self) -> Tensor:
        """Returns the image with the contributions of all ranks added, in place if possible."""
        if self._overlaps is None:
            total = halo_scatter_add(self._image, self._all_dims, self._comm)
            return halo_exchange(total, self._all_dims, self._comm)
        for box, block in self._started.received():
            places = zip(box.target, self._overlaps.dims, self._overlaps.place, strict=True)
            self._image[tuple(_overlap(target, dim, at) for target, dim, at in places)].add_(block)
        return self._image


def _overlap(target: Interval, dim: DimPlan, place: int) -> slice:
    """Returns the pixels of this rank's buffer that a received box of `_overlap_plan` contributes to."""
    before, length = dim.owned[place].start - dim.needed[place].start, len(dim.owned[place])
    if target.stop <= before:
        return target.as_slice()
    start = target.start - before if target.start < before + length else target.start - before - len(target)
    return slice(start, start + len(target))


@lru_cache(maxsize=256)
def _overlap_plan(plan: HaloPlan) -> HaloPlan | None:
    """Returns a plan by which each rank fetches the neighbours' contributions to the pixels of its buffer.

    The dims of this plan are the concatenated buffers of all ranks. The pixels that a rank shares with its predecessor
    are the last ones of the predecessor's buffer, which directly precede its own buffer there. None if buffers overlap
    with more than direct neighbours.
    """
    dims = []
    for dim in plan.dims:
        starts = [0, *accumulate(len(needed) for needed in dim.needed)]
        common = [max(0, one.stop - following.start) for one, following in pairwise(dim.needed)]
        reaches_further = any(one.stop > second.start for one, second in zip(dim.needed, dim.needed[2:], strict=False))
        if reaches_further or any(n > len(needed) for n, needed in zip(common, dim.needed, strict=False)):
            return None
        owned = tuple(Interval(*ends) for ends in pairwise(starts))
        needed = tuple(
            Interval(own.start - before, own.stop + after)
            for own, before, after in zip(owned, [0, *common], [*common, 0], strict=True)
        )
        dims.append(DimPlan(starts[-1], owned, needed))
    return HaloPlan.of(tuple(dims), plan.place)
