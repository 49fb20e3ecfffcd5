"""Differentiable halo exchange: a rank's tile, extended by the neighbours' elements and the padding that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import Function
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.halo.messages import EXCHANGE, SCATTER_ADD, HaloMessages, check_tile
from torchmn.geometry import BoxCopy, HaloPlan


@uncompiled
def halo_exchange(x: Tensor, plan: HaloPlan, comm: Communicator, fill: float = 0.0) -> Tensor:
    """Returns all elements of the image that this rank needs, in one buffer.

    Differentiable, also twice. The adjoint is `halo_scatter_add`: it adds the gradient of each element on the rank that
    owns the element. So all ranks must run backward, also those with an empty buffer.

    Args:
        x: (*leading, *plan.owned_shape), this rank's tile. Leading dims and dtype must be the same on all ranks.
        plan: this rank's plan among the ranks of `comm`.
        comm: communicator of the ranks that share the image; all of them must call.
        fill: value of constant padding.

    Returns:
        A tensor (*leading, *plan.buffer_shape): a view if it is a box of `x`, and `x` itself if no rank needs any halo
        or padding.

    Raises:
        ArgumentError: if `x` or `plan` does not fit this rank.
        MismatchError: if ranks make different exchanges.
    """
    check_tile(x, plan, comm, plan.owned_shape, "this rank's tile")
    if plan.is_identity:
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):  # such as input images
        return StartedHaloExchange(x, plan, comm, fill, False).finish()
    return _HaloExchange.apply(x, plan, comm, fill)


@uncompiled
def halo_scatter_add(g: Tensor, plan: HaloPlan, comm: Communicator) -> Tensor:
    """Returns, for each element that this rank owns, the sum over all ranks' buffers that contain it.

    The adjoint of `halo_exchange`. Differentiable: its adjoint is `halo_exchange` in turn.

    Args:
        g: (*leading, *plan.buffer_shape), a value for each element of this rank's buffer.
        plan: this rank's plan among the ranks of `comm`.
        comm: communicator of the ranks that share the image; all of them must call.

    Returns:
        A tensor (*leading, *plan.owned_shape).

    Raises:
        ArgumentError: if `g` or `plan` does not fit this rank.
        MismatchError: if ranks make different exchanges.
    """
    check_tile(g, plan, comm, plan.buffer_shape, "a buffer")
    if plan.is_identity:
        return g
    return _HaloScatterAdd.apply(g, plan, comm)


def start_halo_exchange(
    x: Tensor, plan: HaloPlan, comm: Communicator, fill: float = 0.0, wants_gradient: bool = False
) -> StartedHaloExchange:
    """Starts a halo exchange without waiting, for computation in the meantime; see `StartedHaloExchange.finish`.

    Not differentiable. Arguments as for `halo_exchange`; `wants_gradient` must be the same on all ranks.
    """
    check_tile(x, plan, comm, plan.owned_shape, "this rank's tile")
    return StartedHaloExchange(x.detach(), plan, comm, fill, wants_gradient)


def start_halo_scatter_add(
    g: Tensor, plan: HaloPlan, comm: Communicator, wants_gradient: bool = False
) -> StartedHaloScatterAdd:
    """Starts `halo_scatter_add` without waiting; `finish()` returns the sums. Not differentiable."""
    check_tile(g, plan, comm, plan.buffer_shape, "a buffer")
    return StartedHaloScatterAdd(g.detach(), plan, comm, wants_gradient)


class StartedHaloExchange:
    """A halo exchange whose messages are in transit."""

    def __init__(self, x: Tensor, plan: HaloPlan, comm: Communicator, fill: float, wants_gradient: bool):
        self._x, self._plan, self._fill = x, plan, fill
        blocks = {peer: [x[box.source_slices] for box in boxes] for peer, boxes in plan.sends.items()}
        self._messages = HaloMessages(comm, plan, EXCHANGE, blocks, x, wants_gradient)

    def received(self) -> list[tuple[BoxCopy, Tensor]]:
        """Waits for the boxes of neighbours; returns each with its values: (*leading, *box.target_shape)."""
        received = self._messages.wait()
        return [
            (box, block if box.is_plain else _expand_block(block, box))
            for peer, blocks in received.items()
            for box, block in zip(self._plan.receives[peer], blocks, strict=True)
        ]

    def finish(self) -> Tensor:
        """Waits for the halos; returns the whole buffer."""
        buffer = buffer_without_halos(self._x, self._plan, self._fill)
        put_halos(buffer, self.received())
        return buffer


class HaloGradients:
    """The gradients of halos, in transit to the ranks that own them.

    Args:
        blocks: by peer, the gradient of each box that came from it: (*leading, *box.source_shape).
        like: a tensor with their dtype, device and leading dims.
        plan: this rank's plan among the ranks of `comm`.
        comm: communicator of the ranks that share the image.
        wants_gradient: whether the result needs a gradient in turn; the same on all ranks.
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
        """Waits for the gradients of this rank's boxes; returns each box with it: (*leading, *box.source_shape)."""
        received = self._messages.wait()
        return [
            (box, block)
            for peer, blocks in received.items()
            for box, block in zip(self.plan.sends[peer], blocks, strict=True)
        ]


class StartedHaloScatterAdd(HaloGradients):
    """The adjoint of a halo exchange whose messages are in transit."""

    def __init__(self, g: Tensor, plan: HaloPlan, comm: Communicator, wants_gradient: bool):
        self._g = g
        blocks = {
            peer: [_reduce_block(g[box.target_slices], box) for box in boxes] for peer, boxes in plan.receives.items()
        }
        super().__init__(blocks, g, plan, comm, wants_gradient)

    def finish(self) -> Tensor:
        """Waits for the gradients of neighbours; returns the gradient of this rank's tile."""
        total = self._own_sum()
        for box, block in self.received():
            total[box.source_slices].add_(block)
        return total

    def _own_sum(self) -> Tensor:
        """Returns what this rank's buffer adds to its tile; a copy if anything else will be added to it."""
        g, plan = self._g, self.plan
        first = plan.local[0] if plan.local else None
        if first is not None and first.is_plain and first.source_shape == plan.owned_shape:
            total, rest = g[first.target_slices], plan.local[1:]
            if rest or plan.sends:
                total = total.clone()
        else:
            total, rest = empty_like_layout(g, plan.owned_shape).zero_(), plan.local
        for box in rest:
            total[box.source_slices].add_(_reduce_block(g[box.target_slices], box))
        return total


class _HaloExchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HaloPlan, comm: Communicator, fill: float) -> Tensor:
        ctx.plan, ctx.comm = plan, comm
        return StartedHaloExchange(x, plan, comm, fill, ctx.needs_input_grad[0]).finish()

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _HaloScatterAdd.apply(grads[0], ctx.plan, ctx.comm), None, None, None


class _HaloScatterAdd(Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, plan: HaloPlan, comm: Communicator) -> Tensor:
        ctx.plan, ctx.comm = plan, comm
        return StartedHaloScatterAdd(g, plan, comm, ctx.needs_input_grad[0]).finish()

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _HaloExchange.apply(grads[0], ctx.plan, ctx.comm, 0.0), None, None


def buffer_without_halos(x: Tensor, plan: HaloPlan, fill: float) -> Tensor:
    """Returns the buffer with this rank's boxes and padding; a view if that is one box of `x`."""
    if plan.is_view:
        return x[plan.local[0].source_slices]
    buffer = empty_like_layout(x, plan.buffer_shape)
    for box in plan.local:
        block = x[box.source_slices]
        buffer[box.target_slices].copy_(block if box.is_plain else _expand_block(block, box))
    for slices in plan.padding_slices:
        buffer[slices].fill_(fill)
    return buffer


def put_halos(buffer: Tensor, received: Sequence[tuple[BoxCopy, Tensor]]) -> None:
    """Writes the boxes of neighbours into the buffer."""
    for box, block in received:
        buffer[box.target_slices].copy_(block)


def _expand_block(block: Tensor, box: BoxCopy) -> Tensor:
    """Returns a block of the owner's tile in the order and shape of the buffer."""
    if box.reversed_dims:
        block = block.flip(box.reversed_dims)
    if box.repeated_dims:
        block = block.expand(*block.shape[: block.dim() - len(box.steps)], *box.target_shape)
    return block


def _reduce_block(block: Tensor, box: BoxCopy) -> Tensor:
    """The adjoint of `_expand_block`."""
    if box.repeated_dims:
        block = block.sum(box.repeated_dims, keepdim=True)
    if box.reversed_dims:
        block = block.flip(box.reversed_dims)
    return block


def empty_like_layout(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns an empty tensor like `x` with other last dims, in its memory format: layers are slower on another one."""
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
