"""Images in memory with the batch innermost, as the layers of local filters compute on them.

A tensor stays (batch, map, height, width) to everyone who looks at it; only the order in memory is (map, height, width,
batch), in the way in which torch's own layers have channels_last. Neighbouring pixels then are long runs of memory, the
rows of a halo too. A layer that gets images in this order gives images in this order, and in torch's own otherwise.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.functions.halo_exchange import halo_exchange, halo_scatter_add
from torchmn.geometry import DimPlan, HaloPlan, Interval


def is_batch_last(x: Tensor) -> bool:
    """Whether (batch, map, height, width) lies in memory with the batch innermost, and not in torch's own order."""
    return x.dim() == 4 and not x.is_contiguous() and x.permute(1, 2, 3, 0).is_contiguous()


def batch_last(x: Tensor) -> Tensor:
    """(map, height, width, batch) from (batch, map, height, width), in memory of that order; no copy if it is there."""
    return _BatchLast.apply(x)  # type: ignore[return-value]


def batch_first(image: Tensor) -> Tensor:
    """(batch, map, height, width) from (map, height, width, batch), in memory of torch's own order."""
    return _BatchFirst.apply(image)  # type: ignore[return-value]


def in_order_of(x: Tensor, image: Tensor) -> Tensor:
    """`image`, (map, height, width, batch), as (batch, map, height, width), in the order in memory of `x`."""
    return image.permute(3, 0, 1, 2) if is_batch_last(x) else batch_first(image)


def as_batch_last(x: Tensor) -> Tensor:
    """`x` itself, (batch, map, height, width), in memory with the batch innermost."""
    return batch_last(x).permute(3, 0, 1, 2)


def planes(x: Tensor) -> Tensor:
    """A view of (batch, map, height, width) as (any, height, width, any), whose last dim is the inner one in memory."""
    return planes_as(x, x)


def planes_as(y: Tensor, x: Tensor) -> Tensor:
    """`planes` of an image `y` in the order in memory of `x`, which has the same batch and maps."""
    if is_batch_last(x):
        return y.permute(1, 2, 3, 0).contiguous()
    return y.contiguous().view(y.shape[0] * y.shape[1], y.shape[2], y.shape[3], 1)


def from_planes(image: Tensor, x: Tensor) -> Tensor:
    """The inverse of `planes(x)`, for an image that may have another height and width."""
    if is_batch_last(x):
        return image.permute(3, 0, 1, 2)
    return image.view(*x.shape[:2], *image.shape[1:3])


def halo_of(x: Tensor, plan: HaloPlan, comm: Communicator) -> Tensor:
    """`halo_exchange` of (batch, map, height, width), in memory with the batch last: then rows are one run each."""
    if x.shape[0] == 0 or x.is_meta:
        return _without_values(x, plan.buffer_shape) if x.is_meta else halo_exchange(x, plan, comm)
    return halo_exchange(x.permute(1, 2, 3, 0), _over_all_dims(plan, x.shape[0], x.shape[1]), comm).permute(3, 0, 1, 2)


def sum_of_halos(buffer: Tensor, plan: HaloPlan, comm: Communicator) -> Tensor:
    """`halo_scatter_add` of (batch, map, height, width), in memory with the batch last."""
    if buffer.shape[0] == 0 or buffer.is_meta:
        return _without_values(buffer, plan.owned_shape) if buffer.is_meta else halo_scatter_add(buffer, plan, comm)
    every = _over_all_dims(plan, buffer.shape[0], buffer.shape[1])
    return halo_scatter_add(buffer.permute(1, 2, 3, 0), every, comm).permute(3, 0, 1, 2)


def _without_values(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return x.new_empty((*x.shape[:2], *size)) + x.sum()


@lru_cache(maxsize=256)
def _over_all_dims(plan: HaloPlan, batch: int, maps: int) -> HaloPlan:
    """The plan of (map, height, width, batch), of which every rank has all maps and images."""
    every_map, every_image = (DimPlan(n, (Interval(0, n),), (Interval(0, n),)) for n in (maps, batch))
    return HaloPlan.of((every_map, *plan.dims, every_image), (0, *plan.place, 0))


# Gradients come back in the order in memory in which the values went. A transposed matrix is what torch copies fastest.
class _BatchLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.is_there = is_batch_last(x)
        if ctx.is_there:
            return x.permute(1, 2, 3, 0)
        return x.reshape(x.shape[0], x.shape[1:].numel()).t().contiguous().view(*x.shape[1:], x.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].permute(3, 0, 1, 2) if ctx.is_there else batch_first(gradients[0])


class _BatchFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor) -> Tensor:
        batch = image.shape[3]
        return image.reshape(image.shape[:3].numel(), batch).t().contiguous().view(batch, *image.shape[:3])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return batch_last(gradients[0])
