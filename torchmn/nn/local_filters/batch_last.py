"""Images in memory pixel by pixel with the batch innermost, as the layers of local filters compute on them.

A tensor stays (batch, map, height, width) to everyone who looks at it; only the order in memory is (height, width, map,
batch), in the way in which torch's own layers have channels_last. Then the pixels that a row of a filter sees are one
run of memory, as its products want them, and so are the rows of a halo. A layer that gets images in this order gives
images in this order, and in torch's own otherwise.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.functions.halo.exchange import halo_exchange, halo_scatter_add
from torchmn.geometry import DimPlan, HaloPlan, Interval


def pixels(x: Tensor) -> Tensor:
    """(height, width, map, batch) from (batch, map, height, width): a view."""
    return x.permute(2, 3, 1, 0)


def from_pixels(image: Tensor) -> Tensor:
    """(batch, map, height, width) from (height, width, map, batch): a view."""
    return image.permute(3, 2, 0, 1)


def is_batch_last(x: Tensor) -> bool:
    """Whether (batch, map, height, width) lies in memory with the batch innermost, and not in torch's own order."""
    return x.dim() == 4 and not x.is_contiguous() and pixels(x).is_contiguous()


def batch_last(x: Tensor) -> Tensor:
    """(height, width, map, batch) from (batch, map, height, width), in memory of that order; no copy if it is there."""
    return pixels(x) if is_batch_last(x) else _BatchLast.apply(x)  # type: ignore[return-value]


def batch_first(image: Tensor) -> Tensor:
    """(batch, map, height, width) from (height, width, map, batch), in memory of torch's own order."""
    return _BatchFirst.apply(image)  # type: ignore[return-value]


def in_order_of(x: Tensor, image: Tensor) -> Tensor:
    """`image`, (height, width, map, batch), as (batch, map, height, width), in the order in memory of `x`."""
    return from_pixels(image) if is_batch_last(x) else batch_first(image)


def as_batch_last(x: Tensor) -> Tensor:
    """`x` itself, (batch, map, height, width), in memory with the batch innermost."""
    return from_pixels(batch_last(x))


def pixels_as(y: Tensor, x: Tensor) -> Tensor:
    """`pixels(y)`, in memory with the batch innermost if `x` is: operations on both are slow in two orders."""
    return pixels(y).contiguous() if is_batch_last(x) else pixels(y)


def room_in_order_of(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory without values, in which dims follow each other as those of `x` do."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(x.dim())])


def halo_of(x: Tensor, plan: HaloPlan, comm: Communicator) -> Tensor:
    """`halo_exchange` of (batch, map, height, width), in memory with the batch last: then a halo of rows is one run."""
    if x.shape[0] == 0 or x.is_meta:
        return _without_values(x, plan.buffer_shape) if x.is_meta else halo_exchange(x, plan, comm)
    return from_pixels(halo_exchange(pixels(x), over_all_dims(plan, x.shape[1], x.shape[0]), comm))


def sum_of_halos(buffer: Tensor, plan: HaloPlan, comm: Communicator) -> Tensor:
    """`halo_scatter_add` of (batch, map, height, width), in memory with the batch last."""
    if buffer.shape[0] == 0 or buffer.is_meta:
        return _without_values(buffer, plan.owned_shape) if buffer.is_meta else halo_scatter_add(buffer, plan, comm)
    every = over_all_dims(plan, buffer.shape[1], buffer.shape[0])
    return from_pixels(halo_scatter_add(pixels(buffer), every, comm))


def _without_values(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return x.new_empty((*x.shape[:2], *size)) + x.sum()


@lru_cache(maxsize=256)
def over_all_dims(plan: HaloPlan, maps: int, batch: int) -> HaloPlan:
    """The plan of (height, width, map, batch), of which every rank has all maps and images."""
    every_map, every_image = (DimPlan(n, (Interval(0, n),), (Interval(0, n),)) for n in (maps, batch))
    return HaloPlan.of((*plan.dims, every_map, every_image), (*plan.place, 0, 0))


# Gradients come back in the order in memory in which the values went. A transposed matrix is what torch copies fastest:
# so the batch is brought to its place first, then the maps, whose rows are long by then.
class _BatchLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        batch, *sizes = x.shape
        by_map = x.reshape(batch, x.shape[1:].numel()).t().contiguous().view(*sizes, batch)
        return by_map.permute(1, 2, 0, 3).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return batch_first(gradients[0])


class _BatchFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor) -> Tensor:
        by_map = image.permute(2, 0, 1, 3)
        *sizes, batch = by_map.shape
        return by_map.reshape(by_map.shape[:3].numel(), batch).t().contiguous().view(batch, *sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return batch_last(gradients[0])
