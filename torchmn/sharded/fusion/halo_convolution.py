"""halo_convolution: a convolution of an image in tiles that overlaps the halo exchange and does not copy the tile.

A convolution is linear, so its output is the sum of the outputs for the tile surrounded by zeros and for each halo
surrounded by zeros. The first is torch's convolution of the tile with zero padding, computed while the halos are on the
way. The others differ from zero along the borders only, and are computed there as small matrix products. Backward works
the same way: the gradients of the halos are sent while that of the tile is computed.

torch pads both ends of a dim equally. If that does not suit a tile, tile and halos are copied into one buffer instead.
The buffer is not saved for backward, which rebuilds it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.functions.halo.exchange import (
    HaloGradients,
    StartedHaloExchange,
    StartedHaloScatterAdd,
    buffer_without_halos,
    halo_exchange,
    put_halos,
)
from torchmn.functions.halo.messages import check_tile
from torchmn.geometry import HaloPlan
from torchmn.sharded.fusion.halo_reach import Borders, Reach, borders_of

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


class ConvolutionSettings(NamedTuple):
    """Settings of a convolution: stride and dilation with one number per image dim."""

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
    """Returns this rank's tile of the convolution of the global image: (batch, out channel, *this rank's outputs).

    Twice differentiable. All ranks must run backward, even those without outputs. The gradients of `weight` and `bias`
    are this rank's contributions: their sum over ranks is the gradient on one rank.

    Args:
        x: (batch, channel, *plan.owned_shape), this rank's tile.
        weight: (out channel, channel / groups, *kernel).
        bias: (out channel,) or None.
        plan: the halo exchange, with the padding, that this rank's outputs need.
        comm: the ranks of the tiles.
        stride: one number per image dim.
        dilation: one number per image dim.
        groups: as of `nn.Conv2d`.
    """
    check_tile(x, plan, comm, plan.owned_shape, "this rank's tile")
    settings = ConvolutionSettings(tuple(stride), tuple(dilation), groups)
    if torch.is_autocast_enabled(x.device.type):  # torch's convolution casts, and autograd must record that
        return _convolved(halo_exchange(x, plan, comm), weight, bias, settings)
    return _HaloConvolution.apply(x, weight, bias, plan, comm, settings)


class _HaloConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: HaloPlan,
        comm: Communicator,
        settings: ConvolutionSettings,
    ) -> Tensor:
        gathering = StartedHaloExchange(x, plan, comm, 0.0, ctx.needs_input_grad[0])
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
        if torch.is_grad_enabled():  # create_graph=True: backward as differentiable steps
            # Views, because torch.autograd.grad would call the hooks of the parameters, which the outer backward calls.
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
    """Adds the contribution of a halo to the outputs."""
    outputs = torch.matmul(reach.kernel(weight, groups), reach.columns(strip, groups))
    y[reach.outputs].add_(outputs.view(*y.shape[:2], *reach.output_shape))


def _halo_gradient(g: Tensor, reach: Reach, weight: Tensor, groups: int) -> Tensor:
    """Returns the gradient of a halo: (batch, channel, *its image dims)."""
    columns = torch.matmul(reach.kernel(weight, groups).transpose(1, 2), reach.output_gradient(g, groups))
    return reach.block(reach.fold(columns, weight.shape[1] * groups))


def _add_weight_gradient(total: Tensor, g: Tensor, reach: Reach, strip: Tensor, groups: int) -> None:
    """Adds the contribution of a halo to the gradient of the weight."""
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
        bias_gradient = g.new_zeros(weight.shape[0]) if wanted[2] else None
        found = [torch.zeros_like(buffer), torch.zeros_like(weight) if wanted[1] else None, bias_gradient]
    if wanted[0]:
        found[0] = StartedHaloScatterAdd(found[0], plan, ctx.comm, False).finish()
    return found


def _convolved(buffer: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvolutionSettings) -> Tensor:
    """Returns the convolution of a buffer without padding; for an empty one, an empty tensor that depends on it."""
    if 0 not in buffer.shape[2:]:
        return _convolution(buffer, weight, bias, settings)
    zero = buffer.sum() * weight.sum() + (0 if bias is None else bias.sum())  # second derivatives depend on it too
    dims = zip(buffer.shape[2:], weight.shape[2:], settings.stride, settings.dilation, strict=True)
    image = [max(0, (extent - dilation * (kernel - 1) - 1) // stride + 1) for extent, kernel, stride, dilation in dims]
    # Not a view: autograd forbids in-place changes of views that a Function returns, and ReLU(inplace=True) may follow.
    return zero.expand(buffer.shape[0], weight.shape[0], *image).clone()


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvolutionSettings, padding: tuple[int, ...] | int = 0
) -> Tensor:
    function = _CONVOLUTIONS[weight.dim() - 3]
    return function(x, weight, bias, settings.stride, padding, settings.dilation, settings.groups)


def _gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    settings: ConvolutionSettings,
    wanted: Any,
    padding: tuple[int, ...] | None = None,
) -> list[Any]:
    """Returns torch's gradients of input, weight and bias, as far as they are wanted."""
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
