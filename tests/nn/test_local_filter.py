"""LocalFilter2d: untied filters, their transpose, their norms, and the memory they take."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nn import naive
from torchmn.errors import ArgumentError
from torchmn.nn import LocalFilter2d

# kernel, stride, in_size, padding
CASES = {
    "square": ((3, 3), (1, 1), (6, 6), (0, 0)),
    "non-square kernel and image": ((2, 4), (1, 1), (5, 7), (0, 0)),
    "strides that leave pixels out": ((2, 2), (3, 4), (9, 8), (0, 0)),
    "overlapping strides, uneven padding": ((4, 3), (2, 1), (8, 5), (1, 2)),
    "padding as wide as the kernel": ((2, 2), (1, 1), (3, 4), (2, 2)),
    "the whole image": ((4, 5), (1, 1), (4, 5), (0, 0)),
    "one pixel": ((1, 1), (1, 1), (3, 2), (0, 0)),
}
every_case = pytest.mark.parametrize(("kernel", "stride", "in_size", "padding"), CASES.values(), ids=CASES)
# Products of many maps are taken where their fields lie, those of few maps of copies of them.
few_and_many_maps = pytest.mark.parametrize(("in_maps", "out_maps"), [(2, 3), (16, 17)])


def layer_of(kernel, stride, in_size, padding=0, bias=False, tied=True, in_maps=2, out_maps=3) -> LocalFilter2d:
    torch.manual_seed(1)
    layer = LocalFilter2d(
        in_maps, out_maps, kernel, stride, in_size, bias, padding=padding, tied=tied, dtype=torch.float64
    )
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    if layer.decoder_weight is not None:
        torch.nn.init.normal_(layer.decoder_weight)
    return layer


def images(layer: LocalFilter2d, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, layer.in_maps, *layer.in_size, dtype=torch.float64, requires_grad=True)


def responses(layer: LocalFilter2d, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, layer.out_maps, *layer.out_size, dtype=torch.float64, requires_grad=True)


@every_case
@few_and_many_maps
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_those_of_the_naive_loop(kernel, stride, in_size, padding, bias, in_maps, out_maps):
    layer = layer_of(kernel, stride, in_size, padding, bias, in_maps=in_maps, out_maps=out_maps)
    x = images(layer)
    expected = naive.local_filter(x.detach(), layer.weight.detach(), layer.bias, stride, padding)
    assert_close(layer(x), expected)
    assert layer(x).shape[2:] == layer.out_size


@every_case
@few_and_many_maps
@pytest.mark.parametrize("tied", [True, False])
def test_transposed_images_are_those_of_the_naive_loop(kernel, stride, in_size, padding, tied, in_maps, out_maps):
    layer = layer_of(kernel, stride, in_size, padding, tied=tied, in_maps=in_maps, out_maps=out_maps)
    y = responses(layer).detach()
    weight = layer.weight if layer.decoder_weight is None else layer.decoder_weight
    assert_close(layer.transpose(y), naive.local_filter_transpose(y, weight.detach(), stride, padding, in_size))


@every_case
@few_and_many_maps
def test_the_tied_decoder_is_the_exact_transpose(kernel, stride, in_size, padding, in_maps, out_maps):
    layer = layer_of(kernel, stride, in_size, padding, in_maps=in_maps, out_maps=out_maps)
    x, y = images(layer), responses(layer)
    assert_close((layer(x) * y).sum(), (x * layer.transpose(y)).sum())


@every_case
@pytest.mark.parametrize(("in_maps", "out_maps", "batch"), [(1, 2, 1), (16, 17, 2), (16, 2, 2), (2, 16, 2)])
def test_gradients_are_exact(kernel, stride, in_size, padding, in_maps, out_maps, batch):
    layer = layer_of(kernel, stride, in_size, padding, True, tied=False, in_maps=in_maps, out_maps=out_maps)
    names = "weight", "bias", "decoder_weight"

    def autoencode(x, *parameters):
        swapped = {f"layer.{name}": parameter for name, parameter in zip(names, parameters, strict=True)}
        return torch.func.functional_call(_There(layer), swapped, (x,))

    # Along random directions where there are many filters: each of them would take minutes.
    assert gradcheck(autoencode, (images(layer, batch), *(getattr(layer, n) for n in names)), fast_mode=batch > 1)


class _There(torch.nn.Module):
    """Encode and decode in one call."""

    def __init__(self, layer: LocalFilter2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer.transpose(self.layer(x))


def test_second_derivatives_are_exact():
    layer = layer_of(2, 1, (3, 3), 1)
    assert gradgradcheck(_There(layer), (images(layer, 1),))


def test_with_the_same_filter_everywhere_it_is_a_convolution():
    layer = layer_of((3, 2), (2, 1), (9, 8), (1, 0), bias=True)
    convolution = torch.nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0), dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(convolution.weight.expand_as(layer.weight))
        layer.bias.copy_(convolution.bias.expand_as(layer.bias))
    x = images(layer)
    assert_close(layer(x), convolution(x))


def test_filters_start_with_norm_1_and_in_different_directions():
    weight = layer_of(3, 1, 6).weight.flatten(0, 2).flatten(1)
    assert_close(weight.norm(dim=1), torch.ones(len(weight), dtype=torch.float64))
    assert len(torch.unique(weight, dim=0)) == len(weight)


def test_a_seed_gives_filters_drawn_in_the_order_of_the_dims():
    torch.manual_seed(3)
    layer = LocalFilter2d(2, 3, 2, 1, 4)
    torch.manual_seed(3)
    drawn = torch.empty(layer.weight.shape).uniform_(-0.1, 0.1)
    assert_close(layer.weight.detach(), drawn / drawn.flatten(3).norm(dim=3)[..., None, None, None])


def test_unit_norm_scales_every_filter_to_norm_1_and_leaves_zeros():
    layer = layer_of(3, 1, 6, tied=False)
    with torch.no_grad():
        layer.weight.mul_(7)
        layer.weight[1, 2, 0] = 0
    before = layer.weight.detach().clone()
    layer.unit_norm_()
    norms = layer.weight.detach().flatten(3).norm(dim=3)
    expected = torch.ones(4, 4, 3, dtype=torch.float64)
    expected[1, 2, 0] = 0
    assert_close(norms, expected)
    assert_close(layer.weight.detach() * 7, before)
    assert_close(layer.decoder_weight.detach().flatten(3).norm(dim=3), torch.ones_like(expected))


def test_an_untied_decoder_starts_as_a_copy_and_is_trained_separately():
    layer = LocalFilter2d(1, 2, 3, 1, 5, tied=False)
    assert torch.equal(layer.weight, layer.decoder_weight)
    layer.transpose(layer(torch.randn(1, 1, 5, 5)).detach()).sum().backward()
    assert layer.weight.grad is None and layer.decoder_weight.grad.abs().sum() > 0


def test_the_batch_may_be_empty():
    layer = layer_of(3, 2, 7, bias=True)
    y = layer(images(layer, 0))
    assert y.shape == (0, 3, 3, 3) and layer.transpose(y).shape == (0, 2, 7, 7)
    y.sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))


@pytest.mark.parametrize(("maps", "unfolds"), [(4, True), (8, False)])
def test_forward_allocates_its_output_and_at_most_a_part_of_the_unfolded_input(maps, unfolds):
    layer = LocalFilter2d(maps, 8, 3, 1, 20)
    x = torch.randn(128, maps, 20, 20)
    with AllocationCount() as allocated, torch.no_grad():
        y = layer(x)
    unfolded = 128 * maps * 9 * 18 * 18 if unfolds else 0
    # The image with the batch last, then by pixel; results by pixel, by map, and with the batch first.
    assert allocated.elements <= unfolded / 2 + 3 * y.numel() + 2 * x.numel()


class AllocationCount(TorchDispatchMode):
    """How many elements the operations inside allocate, views not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self._known: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        inputs = {x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self._known.append(x.untyped_storage())  # alive, so that no address is seen twice
                self.elements += x.untyped_storage().nbytes() // x.element_size()
        return out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kernel": 9}, r"kernel of \(9, 9\) does not fit into an image of \(6, 6\)"),
        ({"kernel": 0}, "expected kernel to be at least 1, got 0"),
        ({"kernel": (3, 3, 3)}, "a pair"),
        ({"stride": 1.5}, "expected stride to be an integer or a pair"),
        ({"padding": -1}, "expected padding to be at least 0, got -1"),
        ({"in_maps": 0}, "expected in_maps to be a whole number of at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_named(wrong, message):
    arguments = {"in_maps": 1, "out_maps": 1, "kernel": 3, "stride": 1, "in_size": 6, **wrong}
    with pytest.raises(ArgumentError, match=message):
        LocalFilter2d(**arguments)


def test_an_image_of_another_size_is_refused():
    layer = LocalFilter2d(1, 2, 3, 1, 6)
    with pytest.raises(ArgumentError, match=r"expected \(batch, 1, 6, 6\), got \(2, 1, 7, 6\).*in_size"):
        layer(torch.zeros(2, 1, 7, 6))
    with pytest.raises(ArgumentError, match=r"transpose: expected \(batch, 2, 4, 4\), got \(2, 1, 4, 4\)"):
        layer.transpose(torch.zeros(2, 1, 4, 4))


def test_the_repr_shows_the_settings():
    assert repr(LocalFilter2d(1, 2, 3, 1, 6, padding=1, tied=False)) == (
        "LocalFilter2d(1, 2, kernel=(3, 3), stride=(1, 1), in_size=(6, 6), bias=False, padding=(1, 1), tied=False)"
    )
