"""convolve_in_chain: consecutive convolutions and ReLUs of a tile with its halo, as one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.compile_boundary import uncompiled
from torchmn.functions.halo.exchange import empty_like_layout
from torchmn.sharded.fusion.onednn_blocks import empty_for_blocks, relu_in_blocks_, to_blocks

_convolution_backward = torch.ops.aten.convolution_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default
_relu_backward_into = torch.ops.aten.threshold_backward.grad_input

Box = tuple[tuple[int, int, int], ...]  # arguments of `narrow`: dim, start, length


class KeptOutputs(NamedTuple):
    """The outputs of a convolution that are kept; the others hold wrong values.

    Attributes:
        shape: the image dims of all outputs.
        box: which of them are kept.
        rest: boxes of the others.
    """

    shape: tuple[int, ...]
    box: Box
    rest: tuple[Box, ...]


class Link(NamedTuple):
    """One convolution of a chain.

    Attributes:
        stride, padding, dilation, groups: its settings, one number per image dim.
        relu: whether a ReLU follows.
        kept: which outputs are kept; None for all.
        stays: whether the outputs stay in oneDNN's blocks for the next convolution (onednn_blocks.py); then all of them
            are kept.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    relu: bool
    kept: KeptOutputs | None = None
    stays: bool = False


def convolve_in_chain(x: Tensor, links: Sequence[Link], parameters: Sequence[Tensor | None]) -> Tensor:
    """Returns the result of these convolutions of `x`, one after the other.

    Twice differentiable. Backward returns all gradients at once, at the end of the chain. There is little Python code
    between two convolutions: it runs slowly there, because a convolution evicts it from the caches.

    Args:
        x: (batch, channel, *image), a tile with its halo.
        links: the convolutions.
        parameters: weight and bias of each, in turn.
    """
    return _Chain.apply(x, links, *parameters)


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
            values[-1] = None  # not needed in backward, so that a later layer may change it in place
        ctx.save_for_backward(*values, *parameters)
        ctx.links = links
        return x

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> Any:
        links, g, saved = ctx.links, grads[0], ctx.saved_tensors
        values, parameters = saved[: len(links) + 1], saved[len(links) + 1 :]
        wanted = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():  # create_graph=True: backward as differentiable steps
            return _differentiable_backward(values[0], links, parameters, g, wanted)
        found: list[Tensor | None] = []
        for number in reversed(range(len(links))):
            link, x, y = links[number], values[number], values[number + 1]
            weight, bias = parameters[2 * number : 2 * number + 2]
            g = _before_relu(g, y, link, may_overwrite=number < len(links) - 1, in_blocks=x.is_mkldnn)
            wants = [any(wanted[: 2 * number + 1]), *wanted[2 * number + 1 : 2 * number + 3]]
            settings = (link.stride, link.padding, link.dilation, False, [0] * len(link.stride), link.groups, wants)
            inputs = x
            if link.stays or x.is_mkldnn:
                g, inputs = to_blocks(g), to_blocks(x)
            bias_shape = None if bias is None else bias.shape
            g, *parameter_gradients = _convolution_backward(g, inputs, weight, bias_shape, *settings)
            if wants[0] and g.is_mkldnn and not x.is_mkldnn:
                g = g.to_dense()
            found[:0] = parameter_gradients
            if not wants[0]:
                found[:0] = [None] * (2 * number)
                break
        return (g if wanted[0] else None, None, *found)


def _convolved(x: Tensor, link: Link, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None  # only the bias may be None
    unset = [0] * len(link.stride)
    x = to_blocks(x) if link.stays else x
    y = torch.convolution(x, weight, bias, link.stride, link.padding, link.dilation, False, unset, link.groups)
    return y.to_dense() if x.is_mkldnn and not link.stays else y


def _before_relu(g: Tensor, y: Tensor | None, link: Link, may_overwrite: bool, in_blocks: bool) -> Tensor:
    """Returns the gradient of all outputs of a convolution.

    Args:
        g: the gradient of the kept outputs, after the ReLU.
        y: these outputs.
        may_overwrite: whether the memory of `g` may be reused.
        in_blocks: whether the convolution's inputs are in blocks, to which the result will be converted too.
    """
    if link.kept is None:
        if link.relu and may_overwrite and not link.stays:
            return _relu_backward_into(g, y, 0, grad_input=g)
        return _relu_backward(g, y, 0) if link.relu else g
    shape = link.kept.shape
    whole = empty_for_blocks(g, (*g.shape[: -len(shape)], *shape)) if in_blocks else empty_like_layout(g, shape)
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
    # Views, because torch.autograd.grad would call the hooks of the parameters, which the outer backward calls.
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
