"""The filters' outputs of a tile, written where they lie among their neighbours', and on their way to them."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby

from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.functions.halo.exchange import HaloGradients, put_halos, start_halo_exchange, start_halo_scatter_add
from torchmn.geometry import HaloPlan
from torchmn.nn.local_filters.batch_last import over_all_dims
from torchmn.nn.local_filters.receptive_fields import outputs, put_filters, put_outputs
from torchmn.nn.local_filters.tiling import Tiling

Rows = tuple[slice, ...]


class TravellingOutputs:
    """Outputs that neighbours wait for are computed first, and travel while the others are. No autograd.

    image: (height, width, map, batch), what this rank's filters see; filters: see `receptive_fields`
    plan: which of all outputs this rank needs, in the two dims of the image

    own: this rank's outputs, (row, column, out_map, batch), in contiguous memory
    """

    def __init__(
        self,
        image: Tensor,
        filters: Tensor,
        tiling: Tiling,
        plan: HaloPlan,
        comm: Communicator,
        wants_gradient: bool = False,
    ) -> None:
        maps, batch = filters.shape[2], image.shape[3]
        self._buffer: Tensor | None = None
        every = over_all_dims(plan, maps, batch)
        if not own_rows_of(plan):
            self.own = outputs(image, filters, tiling)
            self._started = start_halo_exchange(self.own, every, comm, wants_gradient=wants_gradient)
            return
        self._buffer = image.new_empty(*plan.buffer_shape, maps, batch)
        self.own = self._buffer[own_rows_of(plan)]
        awaited, others = rows_in_order(plan)
        self._put(awaited, image, filters, tiling)
        self._started = start_halo_exchange(self.own, every, comm, wants_gradient=wants_gradient)
        self._put(others, image, filters, tiling)

    def _put(self, runs: Rows, image: Tensor, filters: Tensor, tiling: Tiling) -> None:
        for rows in runs:
            pixels, part = tiling.of_rows(rows)
            put_outputs(self.own[rows], image[pixels], filters[rows], part)

    def with_halo(self) -> Tensor:
        """All outputs that this rank needs, (*plan.buffer_shape, out_map, batch): wait for the neighbours'."""
        if self._buffer is None:
            return self._started.finish()
        put_halos(self._buffer, self._started.received())
        return self._buffer


def gradients_of_own(
    g: Tensor, image: Tensor, tiling: Tiling, plan: HaloPlan, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's outputs and of its filters, from `g`, that of all outputs that it needed.

    `g`, (*plan.buffer_shape, out_map, batch), is used up. What neighbours add arrives while the filters of which they
    know nothing get theirs. No autograd.
    """
    maps, batch = g.shape[2:]
    every = over_all_dims(plan, maps, batch)
    filters = g.new_empty(*plan.owned_shape, maps, *tiling.kernel, image.shape[2])
    if not own_rows_of(plan):
        own = start_halo_scatter_add(g, every, comm).finish()
        put_filters(filters, image, own, tiling)
        return own, filters
    blocks = {peer: [g[box.target_slices] for box in boxes] for peer, boxes in every.receives.items()}
    travelling = HaloGradients(blocks, g, every, comm)
    own = g[own_rows_of(plan)]
    awaited, others = rows_in_order(plan)

    def put(runs: Rows) -> None:
        for rows in runs:
            pixels, part = tiling.of_rows(rows)
            put_filters(filters[rows], image[pixels], own[rows], part)

    put(others)
    for box, block in travelling.received():
        own[box.source_slices].add_(block)
    put(awaited)
    return own, filters


@lru_cache(maxsize=256)
def own_rows_of(plan: HaloPlan) -> tuple[slice] | None:
    """Where in its buffer a rank's own part lies, if that is whole rows of it; otherwise None."""
    rows, columns = ((dim.owned[at], dim.needed[at]) for dim, at in zip(plan.dims, plan.place, strict=True))
    owned, needed = rows
    if columns[0] != columns[1] or not (needed.start <= owned.start and owned.stop <= needed.stop):
        return None
    return (owned.shift(-needed.start).as_slice(),)


@lru_cache(maxsize=256)
def rows_in_order(plan: HaloPlan) -> tuple[Rows, Rows]:
    """The rows of a rank's own part that others need, and those that they do not, as runs of neighbouring rows."""
    awaited = {
        row for boxes in plan.sends.values() for box in boxes for row in range(box.source[0].start, box.source[0].stop)
    }
    runs: tuple[list[slice], list[slice]] = ([], [])
    at = 0
    for is_awaited, group in groupby(range(plan.owned_shape[0]), key=awaited.__contains__):
        stop = at + len(list(group))
        runs[0 if is_awaited else 1].append(slice(at, stop))
        at = stop
    return tuple(runs[0]), tuple(runs[1])
