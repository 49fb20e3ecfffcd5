"""halo_convolution: a convolution of an image in tiles, without a second copy of the tile.

A convolution is linear: with the tile in zeros, and then each halo in zeros, it gives outputs whose sum is the output
of all together. The first needs no halo, so it is computed while the halos travel, straight from the tile with torch's
own zero padding; the others differ from zero only along the borders, so they are computed there only. Backward does the
same: the halos' gradients travel while the tile's is computed.

Where torch's padding, which is the same at both ends, can not stand for the zeros around a tile, the halos and the
tile are put together in one buffer instead. It is not kept for backward, which makes it again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.halo.exchange import (
    HaloGathering,
    HaloGradients,
    HaloScattering,
    buffer_without_halos,
    halo_exchange,
    put_halos,
)
from torchmn.functions.halo.messages import check_part
from torchmn.geometry import HaloPlan
from torchmn.sharded.fusion.borders import Borders, Reach, borders_of

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


class Settings(NamedTuple):
    """Of a convolution, one number per image dim."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1


def halo_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: HaloPlan,
    comm: Communicator,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int = 1,
) -> Tensor:
    """This rank's tile of the whole image's convolution: (batch, out channel, *outputs that the plan's needs give).

    x: (batch, channel, *plan.owned_shape), this rank's tile
    plan: its needs are those of this rank's outputs; padding is in the plan

    Differentiable, twice too; all ranks must run backward, those without outputs too. The gradients of `weight` and
    `bias` are this rank's share: their sum over ranks is the serial gradient.
    """
    check_part(x, plan, comm, plan.owned_shape, "this rank's tile")
    settings = Settings(tuple(stride), tuple(dilation), groups)
    if torch.is_autocast_enabled(x.device.type):  # casts go on inside, and backward must see them
        return _convolved(halo_exchange(x, plan, comm), weight, bias, settings)
    return _HaloConvolution.apply(x, weight, bias, plan, comm, settings)  # type: ignore[no-any-return]


class _HaloConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: HaloPlan,
        comm: Communicator,
        settings: Settings,
    ) -> Tensor:
        gathering = HaloGathering(x, plan, comm, 0.0, ctx.needs_input_grad[0])
        borders = borders_of(plan, tuple(weight.shape[2:]), settings.stride, settings.dilation)
        if borders is None:
            buffer = buffer_without_halos(x, plan, 0.0)
            received = gathering.received()
            put_halos(buffer, received)
            y = _convolved(buffer, weight, bias, settings)
            kept = [block for _, block in received]
        else:
            y = _convolution(x, weight, bias, settings, borders.padding)
            kept = []
            for reach, (_, block) in zip(borders.reaches, gathering.received(), strict=True):
                if reach is not None:
                    strip = reach.strip(block)
                    _add_outputs(y, reach, strip, weight, settings.groups)
                    kept.append(strip)
        ctx.save_for_backward(x, weight, bias, *kept)
        ctx.plan, ctx.comm, ctx.settings, ctx.borders = plan, comm, settings, borders
        return y

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias, *kept = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # a second derivative is wanted: backward as differentiable steps
            # Views: torch.autograd.grad calls its inputs' hooks; those of parameters belong to the backward around it.
            x, weight, bias = x.view_as(x), weight.view_as(weight), None if bias is None else bias.view_as(bias)
            y = _convolved(halo_exchange(x, ctx.plan, ctx.comm), weight, bias, ctx.settings)
            given = zip((x, weight, bias), wanted, strict=True)
            inputs = [value for value, want in given if want and value is not None]
            found = iter(torch.autograd.grad(y, inputs, grads[0], create_graph=True))
            return (*(next(found) if want else None for want in wanted), None, None, None)
        backward = _backward_in_buffer if ctx.borders is None else _backward_at_borders
        return (*backward(ctx, grads[0], x, weight, wanted, kept), None, None, None)


def _backward_at_borders(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, wanted: Any, kept: list[Tensor]) -> list[Any]:
    borders: Borders = ctx.borders
    halos = None
    if wanted[0]:
        blocks = [
            None if reach is None else _halo_gradient(g, reach, weight, ctx.settings.groups)
            for reach in borders.reaches
        ]
        halos = HaloGradients(borders.by_peer(blocks, x), x, ctx.plan, ctx.comm)
    found = _gradients(g, x, weight, ctx.settings, wanted, borders.padding)
    if wanted[1]:
        reaches = [reach for reach in borders.reaches if reach is not None]
        for reach, strip in zip(reaches, kept, strict=True):
            _add_weight_gradient(found[1], g, reach, strip, ctx.settings.groups)
    if halos is not None:
        for box, block in halos.received():
            found[0][box.source_slices].add_(block)
    return found


def _add_outputs(y: Tensor, reach: Reach, strip: Tensor, weight: Tensor, groups: int) -> None:
    """Add to the outputs what a halo gives to them."""
    outputs = torch.matmul(reach.kernel(weight, groups), reach.columns(strip, groups))
    y[reach.outputs].add_(outputs.view(*y.shape[:2], *reach.output_shape))


def _halo_gradient(g: Tensor, reach: Reach, weight: Tensor, groups: int) -> Tensor:
    """The gradient of a halo: (batch, channel, *its image dims)."""
    columns = torch.matmul(reach.kernel(weight, groups).transpose(1, 2), reach.output_gradient(g, groups))
    return reach.block(reach.folded(columns, weight.shape[1] * groups))


def _add_weight_gradient(total: Tensor, g: Tensor, reach: Reach, strip: Tensor, groups: int) -> None:
    """Add to the weight's gradient what a halo gives to it."""
    columns = reach.columns(strip, groups).transpose(2, 3)
    share = torch.matmul(reach.output_gradient(g, groups), columns).sum(0)
    total[reach.taps].add_(share.view(*total.shape[:2], *reach.tap_shape))


def _backward_in_buffer(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, wanted: Any, kept: list[Tensor]) -> list[Any]:
    plan: HaloPlan = ctx.plan
    boxes = [box for boxes in plan.receives.values() for box in boxes]
    buffer = buffer_without_halos(x, plan, 0.0)
    put_halos(buffer, list(zip(boxes, kept, strict=True)))
    if g.numel():
        found = _gradients(g, buffer, weight, ctx.settings, wanted)
    else:
        of_bias = g.new_zeros(weight.shape[0]) if wanted[2] else None
        found = [torch.zeros_like(buffer), torch.zeros_like(weight) if wanted[1] else None, of_bias]
    if wanted[0]:
        found[0] = HaloScattering(found[0], plan, ctx.comm, False).finish()
    return found


def _convolved(buffer: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """The convolution of a buffer without padding; for one without outputs, an empty tensor of its graph."""
    if 0 not in buffer.shape[2:]:
        return _convolution(buffer, weight, bias, settings)
    nothing = buffer.sum() * weight.sum() + (0 if bias is None else bias.sum())  # second derivatives hang on it too
    dims = zip(buffer.shape[2:], weight.shape[2:], settings.stride, settings.dilation, strict=True)
    image = [max(0, (extent - dilation * (kernel - 1) - 1) // stride + 1) for extent, kernel, stride, dilation in dims]
    # No view: autograd lets nobody change one that was made inside of a function, and ReLU(inplace=True) may follow.
    return nothing.expand(buffer.shape[0], weight.shape[0], *image).clone()


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, padding: tuple[int, ...] | int = 0
) -> Tensor:
    function = _CONVOLUTIONS[weight.dim() - 3]
    return function(x, weight, bias, settings.stride, padding, settings.dilation, settings.groups)  # type: ignore[arg-type]


def _gradients(
    g: Tensor, x: Tensor, weight: Tensor, settings: Settings, wanted: Any, padding: tuple[int, ...] | None = None
) -> list[Any]:
    """The gradients of input, weight and bias, as far as they are wanted, by torch's own formula."""
    dims = weight.dim() - 2
    return list(
        torch.ops.aten.convolution_backward(
            g,
            x,
            weight,
            [weight.shape[0]],
            settings.stride,
            padding or (0,) * dims,
            settings.dilation,
            False,
            (0,) * dims,
            settings.groups,
            tuple(wanted),
        )
    )
