"""convolve_in_chain: convolutions and ReLUs on a tile with its halo, as one autograd node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.compile_boundary import uncompiled
from torchmn.functions.halo.exchange import empty_like_layout
from torchmn.sharded.fusion.blocks import blocks, relu_in_blocks_, room

_convolution_backward = torch.ops.aten.convolution_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default
_relu_backward_into = torch.ops.aten.threshold_backward.grad_input

Box = tuple[tuple[int, int, int], ...]  # dim, start, length


class Kept(NamedTuple):
    """What is kept of the outputs of a convolution."""

    shape: tuple[int, ...]  # of the image dims of all outputs
    box: Box
    rest: tuple[Box, ...]  # the other outputs


class Link(NamedTuple):
    """The settings of a convolution, whether a ReLU follows, and what is kept of its outputs; None for all.

    stays: the outputs stay in oneDNN's blocks for the next convolution, see halo_blocks.py; all of them are kept then
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    relu: bool
    kept: Kept | None = None
    stays: bool = False


def convolve_in_chain(x: Tensor, links: Sequence[Link], parameters: Sequence[Tensor | None]) -> Tensor:
    """What these convolutions make of `x`, one after the other.

    parameters: the weight and the bias of each, one behind the other

    Differentiable, twice too. All gradients come at once, when backward has gone through the chain. Between two
    convolutions there is next to no Python: it is slow there, because a convolution leaves the caches to nobody else.
    """
    return _Chain.apply(x, links, *parameters)  # type: ignore[no-any-return]


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Sequence[Link], *parameters: Tensor | None) -> Tensor:
        values: list[Tensor | None] = [x]
        for number, link in enumerate(links):
            x = _convolved(x, link, parameters[2 * number], parameters[2 * number + 1])
            if link.kept is not None:
                x = _narrowed(x, link.kept.box)
                x = x.relu() if link.relu else x.clone(memory_format=torch.contiguous_format)
            elif link.relu and link.stays:
                relu_in_blocks_(x)
            elif link.relu:
                x.relu_()
            values.append(x)
        if not links[-1].relu:
            values[-1] = None  # not needed: whoever comes next may change it in place
        ctx.save_for_backward(*values, *parameters)
        ctx.links = links
        return x

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        links, g, saved = ctx.links, grads[0], ctx.saved_tensors
        values, parameters = saved[: len(links) + 1], saved[len(links) + 1 :]
        wanted = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():  # a second derivative is wanted: backward as differentiable steps
            return _differentiable_backward(values[0], links, parameters, g, wanted)
        found: list[Tensor | None] = []
        for number in reversed(range(len(links))):
            link, x, y = links[number], values[number], values[number + 1]
            weight, bias = parameters[2 * number : 2 * number + 2]
            g = _before_relu(g, y, link, is_ours=number < len(links) - 1, in_blocks=x.is_mkldnn)
            wants = [any(wanted[: 2 * number + 1]), *wanted[2 * number + 1 : 2 * number + 3]]
            settings = (link.stride, link.padding, link.dilation, False, [0] * len(link.stride), link.groups, wants)
            seen = x
            if link.stays or x.is_mkldnn:
                g, seen = blocks(g), blocks(x)
            g, *of_parameters = _convolution_backward(g, seen, weight, None if bias is None else bias.shape, *settings)
            if wants[0] and g.is_mkldnn and not x.is_mkldnn:
                g = g.to_dense()
            found[:0] = of_parameters
            if not wants[0]:
                found[:0] = [None] * (2 * number)
                break
        return (g if wanted[0] else None, None, *found)


def _convolved(x: Tensor, link: Link, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None  # only a bias may be missing
    unset = [0] * len(link.stride)
    x = blocks(x) if link.stays else x
    y = torch.convolution(x, weight, bias, link.stride, link.padding, link.dilation, False, unset, link.groups)
    return y.to_dense() if x.is_mkldnn and not link.stays else y


def _before_relu(g: Tensor, y: Tensor | None, link: Link, is_ours: bool, in_blocks: bool) -> Tensor:
    """The gradient of all outputs of a convolution, from that of what was kept of them behind the ReLU.

    is_ours: nobody else has `g`, so its memory may be used
    in_blocks: the convolution's inputs came in blocks, so this will go there
    """
    if link.kept is None:
        if link.relu and is_ours and not link.stays:
            return _relu_backward_into(g, y, 0, grad_input=g)
        return _relu_backward(g, y, 0) if link.relu else g
    shape = link.kept.shape
    whole = room(g, (*g.shape[: -len(shape)], *shape)) if in_blocks else empty_like_layout(g, shape)
    inner = _narrowed(whole, link.kept.box)
    if link.relu:
        _relu_backward_into(g, y, 0, grad_input=inner)
    else:
        inner.copy_(g)
    for box in link.kept.rest:
        _narrowed(whole, box).zero_()
    return whole


def _narrowed(x: Tensor, box: Box) -> Tensor:
    for dim, start, length in box:
        x = x.narrow(dim, start, length)
    return x


def _differentiable_backward(
    x: Tensor, links: Sequence[Link], parameters: Sequence[Tensor | None], g: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    # Views: torch.autograd.grad calls the hooks of its inputs; those of parameters belong to the backward around it.
    x, parameters = x.view_as(x), [None if p is None else p.view_as(p) for p in parameters]
    y = x
    for number, link in enumerate(links):
        y = _convolved(y, link._replace(stays=False), parameters[2 * number], parameters[2 * number + 1])
        y = y if link.kept is None else _narrowed(y, link.kept.box)
        y = y.relu() if link.relu else y
    inputs = [value for value, want in zip((x, *parameters), wanted, strict=True) if want and value is not None]
    found = iter(torch.autograd.grad(y, inputs, g, create_graph=True))
    gradients = [next(found) if want else None for want in wanted]
    return (gradients[0], None, *gradients[1:])
