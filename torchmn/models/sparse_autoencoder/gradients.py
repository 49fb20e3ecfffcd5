"""The cost of a stack's reconstruction and of its pooled outputs, with the gradients of its filters, in closed form.

The cost is quadratic in the decoder, so little is left to compute: y = Wx, x̂ = Dᵀy, e = x̂ - x, then the gradients e·y
of the decoder and x·(De + λ∂p/∂y) of the encoder. On tiles, x̂ is completed with what neighbours decode into it, in the
halo too. Pooled outputs that reach into two tiles are computed on both.
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
from torchmn.models.sparse_autoencoder.overlapped_outputs import TravellingOutputs
from torchmn.nn.local_filters.batch_last import over_all_dims, pixels
from torchmn.nn.local_filters.l2_pool import L2Pool2d, norms_of
from torchmn.nn.local_filters.local_filter import TiledLocalFilter2d, by_pixel, from_by_pixel
from torchmn.nn.local_filters.receptive_fields import decoded, filters_of, outputs
from torchmn.nn.local_filters.tiling import Tiling
from torchmn.nn.local_filters.window_sums import Windows, room_for_spreading, spread_of


class SharesOfImage:
    """Shares on their way to all who have the same pixels. No autograd.

    image: (height, width, map, batch), this rank's share of its buffer; plan: which part of all pixels that is
    """

    def __init__(self, image: Tensor, plan: HaloPlan, comm: Communicator) -> None:
        self._image, self._comm = image, comm
        self._every = over_all_dims(plan, *image.shape[2:])
        together = _buffers_side_by_side(plan)
        self._overlaps = over_all_dims(together, *image.shape[2:]) if together else None
        if self._overlaps is not None:
            self._started = start_halo_exchange(image, self._overlaps, comm)

    def sum_(self) -> Tensor:
        """The image, to which all have added their shares."""
        if self._overlaps is None:
            return halo_exchange(halo_scatter_add(self._image, self._every, self._comm), self._every, self._comm)
        for box, block in self._started.received():
            places = zip(box.target, self._overlaps.dims, self._overlaps.place, strict=True)
            self._image[tuple(_overlap(target, dim, at) for target, dim, at in places)].add_(block)
        return self._image


def _overlap(target: Interval, dim: DimPlan, place: int) -> slice:
    """Which pixels of this rank's buffer those are that neighbours have, too, and that lie beside it in the plan."""
    before, length = dim.owned[place].start - dim.needed[place].start, len(dim.owned[place])
    if target.stop <= before:
        return target.as_slice()
    start = target.start - before if target.start < before + length else target.start - before - len(target)
    return slice(start, start + len(target))


@lru_cache(maxsize=256)
def _buffers_side_by_side(plan: HaloPlan) -> HaloPlan | None:
    """The plan by which everyone fetches its neighbours' shares of its own pixels: None if there are further ones.

    In its dims, all buffers follow one another, each as long as it is. What a rank has in common with the one before it
    are the last pixels of that one's buffer, which in such a dim lie directly in front of its own.
    """
    dims = []
    for dim in plan.dims:
        starts = [0, *accumulate(len(needed) for needed in dim.needed)]
        common = [max(0, one.stop - other.start) for one, other in pairwise(dim.needed)]
        reaches_on = any(one.stop > other.start for one, other in zip(dim.needed, dim.needed[2:], strict=False))
        if reaches_on or any(n > len(needed) for n, needed in zip(common, dim.needed, strict=False)):
            return None
        owned = tuple(Interval(*ends) for ends in pairwise(starts))
        needed = tuple(
            Interval(own.start - before, own.stop + after)
            for own, before, after in zip(owned, [0, *common], [*common, 0], strict=True)
        )
        dims.append(DimPlan(starts[-1], owned, needed))
    return HaloPlan.of(tuple(dims), plan.place)


Pair = tuple[int, int]
Box = tuple[slice, slice]

EVERYTHING: Box = slice(None), slice(None)


def has_closed_form(stack: Stack) -> bool:
    """Whether `gradients` knows the stack's layers: without padding, with stride 1."""
    filters, pool = stack.filter, stack.pool
    settings = (filters.padding, filters.stride, pool.padding, pool.stride)
    return isinstance(pool, L2Pool2d) and filters.bias is None and settings == ((0, 0), (1, 1), (0, 0), (1, 1))


class Gradients(NamedTuple):
    """This rank's share of ½‖x̂ - x‖² and of Σ pooled, and the gradients of its filters."""

    reconstruction: Tensor
    pooled: Tensor
    decoder: Tensor
    encoder: Tensor


@torch.no_grad()
def gradients(stack: Stack, x: Tensor, sparsity: float) -> Gradients:
    """Of ½‖x̂ - x‖² + `sparsity` · Σ pooled, summed over the batch.

    x: (batch, map, height, width), all that this rank's filters see, in memory with the batch last
    """
    filters = stack.filter
    encoder, decoder = by_pixel(filters.weight), by_pixel(filters.decoding_weight(None))
    image = pixels(x)
    tiling = Tiling((x.shape[2], x.shape[3]), filters.kernel, filters.stride)
    if isinstance(filters, TiledLocalFilter2d):
        # Each message travels while something else is computed, and is there before the next one leaves.
        plan, grid = filters.array.plan, filters.grid
        around, counted = _windows_that_touch(filters.out_size, grid.parts_of(2), grid.place_of(2), stack.pool.kernel)
        travelling = TravellingOutputs(image, encoder, tiling, around, grid.tiles)
        y = travelling.own
        image_hat = decoded(y, decoder, tiling)
        y_around = travelling.with_halo()
        shares = SharesOfImage(image_hat, plan, grid.tiles)
        total, slopes = _pooling(stack.pool, y_around, _own(around), counted)
        error = shares.sum_().sub_(image)
        own_error = error[_own(plan)]
    else:
        y = outputs(image, encoder, tiling)
        own_error = error = decoded(y, decoder, tiling).sub_(image)
        total, slopes = _pooling(stack.pool, y, EVERYTHING, EVERYTHING)
    y_gradient = outputs(error, decoder, tiling).add_(slopes, alpha=sparsity)
    return Gradients(
        torch.dot(own_error.reshape(-1), own_error.reshape(-1)) / 2,
        total,
        from_by_pixel(filters_of(error, y, tiling)),
        from_by_pixel(filters_of(image, y_gradient, tiling)),
    )


def _pooling(pool: L2Pool2d, y: Tensor, mine: Box, counted: Box) -> tuple[Tensor, Tensor]:
    """The sum of this rank's pooled values, and the gradient of the sum of everybody's.

    y: (height, width, map, batch), the filters' outputs that all pooled values see which this rank's reach
    mine, counted: which of them are this rank's outputs, and which pooled values are its own
    """
    windows = Windows((y.shape[0], y.shape[1]), pool.kernel, pool.stride)
    norms = norms_of(y, windows, pool.eps)
    total = norms[counted].sum()
    field, inverse = room_for_spreading(norms, windows)
    torch.reciprocal(torch.threshold_(norms, 0.0, torch.inf), out=inverse)
    return total, spread_of(field, windows)[mine].mul_(y[mine])


@lru_cache(maxsize=256)
def _windows_that_touch(size: Pair, parts: Pair, place: Pair, kernel: Pair) -> tuple[HaloPlan, Box]:
    """The halo for all pooled values that depend on a rank's outputs, and which of them begin in its tile."""
    dims, counted = [], []
    for extent, count, at, length in zip(size, parts, place, kernel, strict=True):
        owned, windows = all_owned(extent, count), extent - length + 1
        needed = tuple(Interval(max(0, one.start - length + 1), min(extent, one.stop + length - 1)) for one in owned)
        dims.append(DimPlan(extent, owned, needed))
        first, last = min(windows, owned[at].start), min(windows, owned[at].stop)
        counted.append(slice(first - needed[at].start, last - needed[at].start))
    return HaloPlan.of(tuple(dims), place), (counted[0], counted[1])


def _own(plan: HaloPlan) -> Box:
    """Where in its buffer a rank's own pixels lie."""
    rows, columns = (
        dim.owned[at].shift(-dim.needed[at].start).as_slice() for dim, at in zip(plan.dims, plan.place, strict=True)
    )
    return rows, columns
