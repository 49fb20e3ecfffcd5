"""halo_exchange: each rank's part becomes all that it needs, neighbours' rows and padding included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.halo.messages import GATHER, SCATTER_ADD, HaloMessages, check_part
from torchmn.geometry import BoxCopy, HaloPlan


@uncompiled
def halo_exchange(x: Tensor, plan: HaloPlan, comm: Communicator, fill: float = 0.0) -> Tensor:
    """All that this rank needs of the whole image, in one buffer: (*leading, *plan.buffer_shape).

    x: (*leading, *plan.owned_shape), this rank's part; all ranks must have the same leading dims and dtype
    plan: this rank's plan among the ranks of `comm`
    fill: what constant padding is filled with

    Differentiable, twice too: backward adds every gradient to the rank that owns the element, so all ranks must run
    it, those with an empty buffer too. Where the buffer is a box of `x` it is a view, and `x` itself where no rank
    needs anything.
    """
    check_part(x, plan, comm, plan.owned_shape, "this rank's part")
    if plan.is_identity:
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):  # images, mostly: no graph, so no node
        return HaloGathering(x, plan, comm, fill, False).finish()
    return _Gather.apply(x, plan, comm, fill)  # type: ignore[no-any-return]


@uncompiled
def halo_scatter_add(g: Tensor, plan: HaloPlan, comm: Communicator) -> Tensor:
    """The adjoint of `halo_exchange`: for each element that this rank owns, the sum over all ranks' buffers.

    g: (*leading, *plan.buffer_shape); the result is (*leading, *plan.owned_shape). Differentiable.
    """
    check_part(g, plan, comm, plan.buffer_shape, "a buffer")
    if plan.is_identity:
        return g
    return _ScatterAdd.apply(g, plan, comm)  # type: ignore[no-any-return]


def start_halo_exchange(
    x: Tensor, plan: HaloPlan, comm: Communicator, fill: float = 0.0, wants_gradient: bool = False
) -> HaloGathering:
    """Start to send the halos of `x` and return: compute what needs no halo, then call `finish()`. No autograd."""
    check_part(x, plan, comm, plan.owned_shape, "this rank's part")
    return HaloGathering(x.detach(), plan, comm, fill, wants_gradient)


def start_halo_scatter_add(
    g: Tensor, plan: HaloPlan, comm: Communicator, wants_gradient: bool = False
) -> HaloScattering:
    """Start to send the gradients of halos to their owners and return; `finish()` gives the sums. No autograd."""
    check_part(g, plan, comm, plan.buffer_shape, "a buffer")
    return HaloScattering(g.detach(), plan, comm, wants_gradient)


class HaloGathering:
    """A halo exchange on its way."""

    def __init__(self, x: Tensor, plan: HaloPlan, comm: Communicator, fill: float, wants_gradient: bool):
        self._x, self._plan, self._fill = x, plan, fill
        blocks = {peer: [x[box.source_slices] for box in boxes] for peer, boxes in plan.sends.items()}
        self._messages = HaloMessages(comm, plan, GATHER, blocks, x, wants_gradient)

    def received(self) -> list[tuple[BoxCopy, Tensor]]:
        """The boxes that came from neighbours, each with its block of shape (*leading, *box.target_shape)."""
        arrived = self._messages.arrived()
        return [
            (box, block if box.is_plain else _spread(block, box))
            for peer, blocks in arrived.items()
            for box, block in zip(self._plan.receives[peer], blocks, strict=True)
        ]

    def finish(self) -> Tensor:
        """The whole buffer, once the halos have come."""
        buffer = buffer_without_halos(self._x, self._plan, self._fill)
        put_halos(buffer, self.received())
        return buffer


class HaloGradients:
    """The gradients of halos on their way to the ranks that own them.

    blocks: per peer, the gradient of each box that came from it: (*leading, *box.source_shape)
    like: its dtype, device and leading dims are theirs
    """

    def __init__(
        self,
        blocks: Mapping[int, Sequence[Tensor]],
        like: Tensor,
        plan: HaloPlan,
        comm: Communicator,
        wants_gradient: bool = False,
    ):
        self.plan = plan
        self._messages = HaloMessages(comm, plan, SCATTER_ADD, blocks, like, wants_gradient)

    def received(self) -> list[tuple[BoxCopy, Tensor]]:
        """The boxes of this rank's part that neighbours had, each with its gradient: (*leading, *box.source_shape)."""
        arrived = self._messages.arrived()
        return [
            (box, block)
            for peer, blocks in arrived.items()
            for box, block in zip(self.plan.sends[peer], blocks, strict=True)
        ]


class HaloScattering(HaloGradients):
    """The adjoint of a halo exchange on its way."""

    def __init__(self, g: Tensor, plan: HaloPlan, comm: Communicator, wants_gradient: bool):
        self._g = g
        blocks = {
            peer: [_gathered(g[box.target_slices], box) for box in boxes] for peer, boxes in plan.receives.items()
        }
        super().__init__(blocks, g, plan, comm, wants_gradient)

    def finish(self) -> Tensor:
        """The gradient of this rank's part, once all have come."""
        total = self._own()
        for box, block in self.received():
            total[box.source_slices].add_(block)
        return total

    def _own(self) -> Tensor:
        """What this rank's own buffer adds to its own part; memory of its own where anything is added to it."""
        g, plan = self._g, self.plan
        first = plan.local[0] if plan.local else None
        if first is not None and first.is_plain and first.source_shape == plan.owned_shape:
            total, rest = g[first.target_slices], plan.local[1:]
            if rest or plan.sends:
                total = total.clone()
        else:
            total, rest = empty_like_layout(g, plan.owned_shape).zero_(), plan.local
        for box in rest:
            total[box.source_slices].add_(_gathered(g[box.target_slices], box))
        return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HaloPlan, comm: Communicator, fill: float) -> Tensor:
        ctx.plan, ctx.comm = plan, comm
        return HaloGathering(x, plan, comm, fill, ctx.needs_input_grad[0]).finish()

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ScatterAdd.apply(grads[0], ctx.plan, ctx.comm), None, None, None


class _ScatterAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, plan: HaloPlan, comm: Communicator) -> Tensor:
        ctx.plan, ctx.comm = plan, comm
        return HaloScattering(g, plan, comm, ctx.needs_input_grad[0]).finish()

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Gather.apply(grads[0], ctx.plan, ctx.comm, 0.0), None, None


def buffer_without_halos(x: Tensor, plan: HaloPlan, fill: float) -> Tensor:
    """The buffer with all that this rank has itself: its own boxes and padding. A view where that is one box of `x`."""
    if plan.is_view:
        return x[plan.local[0].source_slices]
    buffer = empty_like_layout(x, plan.buffer_shape)
    for box in plan.local:
        block = x[box.source_slices]
        buffer[box.target_slices].copy_(block if box.is_plain else _spread(block, box))
    for slices in plan.padding_slices:
        buffer[slices].fill_(fill)
    return buffer


def put_halos(buffer: Tensor, received: Sequence[tuple[BoxCopy, Tensor]]) -> None:
    """Write the boxes that came from neighbours into the buffer."""
    for box, block in received:
        buffer[box.target_slices].copy_(block)


def _spread(block: Tensor, box: BoxCopy) -> Tensor:
    """A block of the owner's part as it lies in the buffer."""
    if box.reversed_dims:
        block = block.flip(box.reversed_dims)
    if box.repeated_dims:
        block = block.expand(*block.shape[: block.dim() - len(box.steps)], *box.target_shape)
    return block


def _gathered(block: Tensor, box: BoxCopy) -> Tensor:
    """The adjoint of `_spread`."""
    if box.repeated_dims:
        block = block.sum(box.repeated_dims, keepdim=True)
    if box.reversed_dims:
        block = block.flip(box.reversed_dims)
    return block


def empty_like_layout(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Room for `x` with other last dims, in the memory format of `x`: layers are slower on another one."""
    whole = (*x.shape[: x.dim() - len(shape)], *shape)
    return torch.empty(whole, dtype=x.dtype, device=x.device, memory_format=_memory_format(x))


def _memory_format(x: Tensor) -> torch.memory_format:
    if x.is_contiguous():
        return torch.contiguous_format
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format
