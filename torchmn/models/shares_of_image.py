"""Images to whose every pixel several ranks add, summed wherever a rank has the pixel, in one exchange.

A rank decodes into all that its filters see, and neighbours' filters see some of the same pixels. The sum could go to
each pixel's owner and come back as a halo, which is two exchanges. Here, ranks that have a pixel in common give each
other their shares of it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.functions.halo_exchange import halo_exchange, halo_scatter_add, start_halo_exchange
from torchmn.geometry import DimPlan, HaloPlan, Interval
from torchmn.nn.batch_last import over_all_dims


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
