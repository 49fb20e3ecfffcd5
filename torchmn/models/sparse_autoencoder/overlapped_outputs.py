"""Outputs of a tile's filters, and their gradients, computed while the halo exchange is under way."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby

from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.functions.halo.exchange import HaloGradients, put_halos, start_halo_exchange, start_halo_scatter_add
from torchmn.geometry import HaloPlan
from torchmn.nn.local_filters.batch_last import over_all_dims
from torchmn.nn.local_filters.field_grid import FieldGrid
from torchmn.nn.local_filters.receptive_fields import outputs, put_filters, put_outputs

Rows = tuple[slice, ...]


class OverlappedOutputs:
    """The outputs of a tile's filters: those that neighbours need are computed and sent first, then the others.

    Not differentiable.

    Args:
        image: (height, width, map, batch), the inputs of this rank's filters, with halo.
        filters: see `receptive_fields`.
        field_grid: the positions of the filters.
        plan: the halo plan of the outputs, in two dims.
        comm: the ranks of the tiles.
        wants_gradient: whether `gradients_of_owned` will be called.

    Attributes:
        owned: this rank's outputs, (row, column, out_map, batch), contiguous.
    """

    def __init__(
        self,
        image: Tensor,
        filters: Tensor,
        field_grid: FieldGrid,
        plan: HaloPlan,
        comm: Communicator,
        wants_gradient: bool = False,
    ) -> None:
        maps, batch = filters.shape[2], image.shape[3]
        self._buffer: Tensor | None = None
        all_dims = over_all_dims(plan, maps, batch)
        if not owned_rows(plan):
            self.owned = outputs(image, filters, field_grid)
            self._started = start_halo_exchange(self.owned, all_dims, comm, wants_gradient=wants_gradient)
            return
        self._buffer = image.new_empty(*plan.buffer_shape, maps, batch)
        self.owned = self._buffer[owned_rows(plan)]
        sent, not_sent = sent_and_other_rows(plan)
        self._put(sent, image, filters, field_grid)
        self._started = start_halo_exchange(self.owned, all_dims, comm, wants_gradient=wants_gradient)
        self._put(not_sent, image, filters, field_grid)

    def _put(self, runs: Rows, image: Tensor, filters: Tensor, field_grid: FieldGrid) -> None:
        for rows in runs:
            pixels, part = field_grid.of_rows(rows)
            put_outputs(self.owned[rows], image[pixels], filters[rows], part)

    def with_halo(self) -> Tensor:
        """Returns all outputs that this rank needs, (*plan.buffer_shape, out_map, batch); waits for the neighbours."""
        if self._buffer is None:
            return self._started.finish()
        put_halos(self._buffer, self._started.received())
        return self._buffer


def gradients_of_owned(
    g: Tensor, image: Tensor, field_grid: FieldGrid, plan: HaloPlan, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of this rank's outputs and of its filters. Not differentiable.

    The gradients of filters without contributions of neighbours are computed while these are on the way.

    Args:
        g: (*plan.buffer_shape, out_map, batch), the gradient of `OverlappedOutputs.with_halo()`. It is overwritten.
        image, field_grid, plan, comm: as of `OverlappedOutputs`.
    """
    maps, batch = g.shape[2:]
    all_dims = over_all_dims(plan, maps, batch)
    filters = g.new_empty(*plan.owned_shape, maps, *field_grid.kernel, image.shape[2])
    if not owned_rows(plan):
        owned = start_halo_scatter_add(g, all_dims, comm).finish()
        put_filters(filters, image, owned, field_grid)
        return owned, filters
    blocks = {peer: [g[box.target_slices] for box in boxes] for peer, boxes in all_dims.receives.items()}
    halo_gradients = HaloGradients(blocks, g, all_dims, comm)
    owned = g[owned_rows(plan)]
    sent, not_sent = sent_and_other_rows(plan)

    def put(runs: Rows) -> None:
        for rows in runs:
            pixels, part = field_grid.of_rows(rows)
            put_filters(filters[rows], image[pixels], owned[rows], part)

    put(not_sent)
    for box, block in halo_gradients.received():
        owned[box.source_slices].add_(block)
    put(sent)
    return owned, filters


@lru_cache(maxsize=256)
def owned_rows(plan: HaloPlan) -> tuple[slice] | None:
    """Returns the rows of a rank's own tile in its buffer, if the tile is as wide as the buffer; otherwise None."""
    rows, columns = ((dim.owned[at], dim.needed[at]) for dim, at in zip(plan.dims, plan.place, strict=True))
    owned, needed = rows
    if columns[0] != columns[1] or not (needed.start <= owned.start and owned.stop <= needed.stop):
        return None
    return (owned.shift(-needed.start).as_slice(),)


@lru_cache(maxsize=256)
def sent_and_other_rows(plan: HaloPlan) -> tuple[Rows, Rows]:
    """Returns the rows of a rank's tile that are sent to neighbours, and the others, each as slices."""
    sent = {
        row for boxes in plan.sends.values() for box in boxes for row in range(box.source[0].start, box.source[0].stop)
    }
    runs: tuple[list[slice], list[slice]] = ([], [])
    at = 0
    for is_sent, group in groupby(range(plan.owned_shape[0]), key=sent.__contains__):
        stop = at + len(list(group))
        runs[0 if is_sent else 1].append(slice(at, stop))
        at = stop
    return tuple(runs[0]), tuple(runs[1])
