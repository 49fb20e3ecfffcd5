"""The memory format "batch last": images in memory as (height, width, map, batch).

The shape of a tensor stays (batch, map, height, width), as with torch's channels_last. In this order, the pixels under
a row of a filter are contiguous in memory, which its matrix products need, and so are the rows of a halo. Layers of
local filters return images in the memory format of their input.
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
    """Returns a view (height, width, map, batch) of x: (batch, map, height, width)."""
    return x.permute(2, 3, 1, 0)


def from_pixels(image: Tensor) -> Tensor:
    """Returns a view (batch, map, height, width) of image: (height, width, map, batch)."""
    return image.permute(3, 2, 0, 1)


def is_batch_last(x: Tensor) -> bool:
    """Whether x: (batch, map, height, width) is in memory with the batch last, and is not contiguous."""
    return x.dim() == 4 and not x.is_contiguous() and pixels(x).is_contiguous()


def batch_last(x: Tensor) -> Tensor:
    """Returns contiguous (height, width, map, batch) from x: (batch, map, height, width); a view if possible."""
    return pixels(x) if is_batch_last(x) else _BatchLast.apply(x)


def batch_first(image: Tensor) -> Tensor:
    """Returns contiguous (batch, map, height, width) from image: (height, width, map, batch)."""
    return _BatchFirst.apply(image)


def in_order_of(x: Tensor, image: Tensor) -> Tensor:
    """Returns (batch, map, height, width) from image: (height, width, map, batch), in the memory format of `x`."""
    return from_pixels(image) if is_batch_last(x) else batch_first(image)


def as_batch_last(x: Tensor) -> Tensor:
    """Returns x: (batch, map, height, width) in memory with the batch last."""
    return from_pixels(batch_last(x))


def pixels_as(y: Tensor, x: Tensor) -> Tensor:
    """Returns `pixels(y)` in the memory format of `x`: operations on two memory formats are slow."""
    return pixels(y).contiguous() if is_batch_last(x) else pixels(y)


def empty_in_order_of(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns an uninitialised tensor of `shape` with the order of dims in memory of `x`."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(x.dim())])


def halo_of(x: Tensor, plan: HaloPlan, comm: Communicator) -> Tensor:
    """Returns `halo_exchange` of x: (batch, map, height, width), in memory with the batch last."""
    if x.shape[0] == 0 or x.is_meta:
        return _meta(x, plan.buffer_shape) if x.is_meta else halo_exchange(x, plan, comm)
    return from_pixels(halo_exchange(pixels(x), over_all_dims(plan, x.shape[1], x.shape[0]), comm))


def sum_of_halos(buffer: Tensor, plan: HaloPlan, comm: Communicator) -> Tensor:
    """Returns `halo_scatter_add` of (batch, map, height, width), in memory with the batch last."""
    if buffer.shape[0] == 0 or buffer.is_meta:
        return _meta(buffer, plan.owned_shape) if buffer.is_meta else halo_scatter_add(buffer, plan, comm)
    all_dims = over_all_dims(plan, buffer.shape[1], buffer.shape[0])
    return from_pixels(halo_scatter_add(pixels(buffer), all_dims, comm))


def _meta(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return x.new_empty((*x.shape[:2], *size)) + x.sum()


@lru_cache(maxsize=256)
def over_all_dims(plan: HaloPlan, maps: int, batch: int) -> HaloPlan:
    """Returns the halo plan of (height, width, map, batch) from the plan of (height, width)."""
    every_map, every_image = (DimPlan(n, (Interval(0, n),), (Interval(0, n),)) for n in (maps, batch))
    return HaloPlan.of((*plan.dims, every_map, every_image), (*plan.place, 0, 0))


# Gradients have the memory format of the values. Torch copies a transposed matrix fastest, so the batch dim is moved
# first, and then the maps in long rows.
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
