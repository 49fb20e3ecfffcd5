"""Images that are the same on every rank, their tiles, and the serial result of a halo exchange."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from tests.geometry.oracle import global_index
from torchmn import Communicator
from torchmn.geometry import DimPlan, HaloPlan, Interval


def image(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plan_here(dims: tuple[DimPlan, ...], comm: Communicator) -> HaloPlan:
    """This rank's plan."""
    return HaloPlan.of(dims, list(product(*(range(dim.parts) for dim in dims)))[comm.rank])


def cut(whole: Tensor, intervals: list[Interval]) -> Tensor:
    """A box of the last dims of `whole`, as a copy."""
    return whole[(..., *(interval.as_slice() for interval in intervals))].clone()


def part_of(whole: Tensor, plan: HaloPlan) -> Tensor:
    """This rank's tile of `whole`."""
    return cut(whole, [dim.owned[at] for dim, at in zip(plan.dims, plan.place, strict=True)])


def serial_buffer(whole: Tensor, plan: HaloPlan, fill: float = 0.0) -> Tensor:
    """The expected result of the exchange, from the whole image; differentiable."""
    buffer = whole
    for number, (dim, at) in enumerate(zip(plan.dims, plan.place, strict=True)):
        axis = number - len(plan.dims)
        needed = dim.needed[at]
        indices = [global_index(i, dim.extent, dim.padding_mode) for i in range(needed.start, needed.stop)]
        rows = torch.tensor([index or 0 for index in indices], dtype=torch.int64)
        buffer = buffer.index_select(axis, rows)
        constant = torch.tensor([index is None for index in indices], dtype=torch.bool)
        shape = [1] * -axis
        shape[0] = len(indices)
        buffer = torch.where(constant.view(shape), torch.full((), fill, dtype=whole.dtype), buffer)
    return buffer
