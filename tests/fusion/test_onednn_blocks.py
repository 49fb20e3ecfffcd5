"""Chains in oneDNN's blocked memory format: same numbers, including NaN and infinity."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from torchmn.sharded.fusion import onednn_blocks
from torchmn.sharded.fusion.conv_chain import KeptOutputs, Link, convolve_in_chain
from torchmn.sharded.fusion.onednn_blocks import may_stay_in_blocks

pytestmark = pytest.mark.skipif(not onednn_blocks._IS_KNOWN, reason="no oneDNN that is known")


def links_of(dims: int, relus: Sequence[bool], kernel: int = 3, groups: int = 1, dilation: int = 1) -> list[Link]:
    """A chain whose outputs all stay, except for those of the last convolution."""
    padding = (dilation * (kernel - 1) // 2,) * dims
    settings = ((1,) * dims, padding, (dilation,) * dims, groups)
    return [Link(*settings, relu, None, number < len(relus)) for number, relu in enumerate(relus, start=1)]


def parameters_of(
    channels: Sequence[int], dims: int, kernel: int = 3, groups: int = 1, bias: bool = True
) -> list[Tensor | None]:
    made: list[Tensor | None] = []
    for before, behind in pairwise(channels):
        made.append((torch.randn(behind, before // groups, *[kernel] * dims) * 0.2).requires_grad_())
        made.append(torch.randn(behind).requires_grad_() if bias else None)
    return made


def without_blocks(links: Sequence[Link]) -> list[Link]:
    return [link._replace(stays=False) for link in links]


def results(
    x: Tensor, links: Sequence[Link], parameters: Sequence[Tensor | None], wants_x: bool = True
) -> list[Tensor]:
    """The chain's outputs, and the gradients of all tensors that require one."""
    x = x.clone().requires_grad_(wants_x)
    y = convolve_in_chain(x, links, parameters)
    inputs = [value for value in (x, *parameters) if value is not None and value.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, inputs, torch.linspace(-1, 1, y.numel()).view(y.shape))]


def assert_same(x: Tensor, links: Sequence[Link], parameters: Sequence[Tensor | None], **how: Any) -> None:
    assert any(link.stays for link in links)
    found, expected = results(x, links, parameters, **how), results(x, without_blocks(links), parameters, **how)
    assert all(value.layout is torch.strided for value in found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("relus", [(True, True), (False, True, False), (True, False, True, True)], ids=str)
def test_blocks_change_no_number(dims, relus):
    parameters = parameters_of([3, *[16] * len(relus)], dims)
    assert_same(torch.randn(2, 3, *[9, 7, 5][:dims]), links_of(dims, relus), parameters)


@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize(("groups", "dilation", "bias"), [(2, 1, True), (16, 2, False)])
def test_other_settings(kernel, groups, dilation, bias):
    parameters = parameters_of([16, 32, 48, 16], 2, kernel, groups, bias)
    links = links_of(2, (True, True, True), kernel, groups, dilation)
    assert_same(torch.randn(2, 16, 12, 11), links, parameters)


def test_a_last_convolution_with_few_channels_of_which_some_rows_are_dropped():
    *links, last = links_of(2, (True, True, True))
    last = last._replace(kept=KeptOutputs((9, 7), ((2, 2, 7),), (((2, 0, 2),),)))
    assert_same(torch.randn(2, 3, 9, 7), [*links, last], parameters_of([3, 16, 16, 5], 2))


def test_gradients_that_are_not_needed():
    parameters = parameters_of([3, 16, 16, 16], 2)
    assert_same(torch.randn(2, 3, 9, 7), links_of(2, (True, True, True)), parameters, wants_x=False)
    for frozen in parameters[:3]:
        assert frozen is not None
        frozen.requires_grad_(False)
    assert_same(torch.randn(2, 3, 9, 7), links_of(2, (True, True, True)), parameters, wants_x=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_model_that_diverges_shows_it(value):
    x = torch.randn(1, 3, 9, 7)
    x[0, 1, 4, 4] = value
    links, parameters = links_of(2, (True, True, True)), parameters_of([3, 16, 16, 16], 2)
    assert_same(x, links, parameters)
    assert convolve_in_chain(x, links, parameters).isnan().any()


def test_backward_twice_and_second_derivatives():
    x = torch.randn(1, 3, 6, 5, requires_grad=True)
    parameters, links = parameters_of([3, 16, 16], 2), links_of(2, (True, False))

    def derivatives(links: Sequence[Link]) -> list[Tensor]:
        y = convolve_in_chain(x, links, parameters)
        (once,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        assert torch.equal(once, again) or torch.allclose(once, again, rtol=1e-4, atol=1e-4)
        weight = parameters[2]
        assert weight is not None
        return [once, *torch.autograd.grad(again.square().sum(), [x, weight])]

    torch.testing.assert_close(derivatives(links), derivatives(without_blocks(links)), rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:TF32")  # torch warns whenever these flags are set
def test_hooks_and_dispatch_modes_never_see_blocks():
    x, weights = torch.zeros(1, 16, 128, 64), [torch.zeros(16, 16, 1, 1)] * 2
    assert may_stay_in_blocks(x, weights)
    with torch.autograd.graph.save_on_cpu():
        assert not may_stay_in_blocks(x, weights)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not may_stay_in_blocks(x, weights)
    assert not may_stay_in_blocks(x.double(), weights)
    assert not may_stay_in_blocks(x.contiguous(memory_format=torch.channels_last), weights)
    assert not may_stay_in_blocks(x[:0], weights)
    assert not may_stay_in_blocks(x[:, :, :64].contiguous(), weights)  # too small to be worth it
    assert not may_stay_in_blocks(
        x, [torch.zeros(12, 16, 1, 1), torch.zeros(16, 12, 1, 1)]
    )  # blocks would be filled up
