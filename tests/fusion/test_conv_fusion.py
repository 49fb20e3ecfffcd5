"""Fused nn.Sequential: same numbers as layer by layer, and hooks and modes still see every layer."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import torchmn
from tests._worlds import ranks
from tests.fusion.small_tiles import IMAGE, conv, let_small_tiles_have_wide_halos, tile_of
from tests.sharded.parity import (
    assert_close,
    assert_parity,
    assert_same,
    gradients_of,
    numbers,
    run_on_grid,
    run_serially,
    sizes_of,
)
from torchmn import ProcessGrid
from torchmn.parallel import parallelize
from torchmn.sharded.fusion import conv_chain, conv_fusion, onednn_blocks


@pytest.fixture(autouse=True)
def small_tiles_too(monkeypatch):
    let_small_tiles_have_wide_halos(monkeypatch)
    monkeypatch.setattr(onednn_blocks, "_LEAST_BYTES", 0)
    monkeypatch.setattr(conv_fusion, "_ROWS_PER_HALO_IN_BLOCKS", 1)


@pytest.fixture
def chained(monkeypatch) -> list[int]:
    """How many convolutions each chain had, on all ranks."""
    lengths: list[int] = []
    convolve = conv_fusion.convolve_in_chain

    def counting(x: Tensor, links: Any, parameters: Any) -> Tensor:
        lengths.append(len(links))
        return convolve(x, links, parameters)

    monkeypatch.setattr(conv_fusion, "convolve_in_chain", counting)
    return lengths


def four() -> nn.Sequential:
    layers = [conv(2, 3), nn.ReLU(), conv(3, 3), nn.ReLU(inplace=True), conv(3, 4), conv(4, 2), nn.ReLU()]
    return nn.Sequential(*layers)


class Around(nn.Module):
    """A block in the middle of a model that is no Sequential."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.tanh(x)).square() + x


NETS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "four": (four, [4]),
    "blocks in a block": (
        lambda: nn.Sequential(
            nn.Sequential(conv(2, 3), nn.ReLU()), nn.Sequential(nn.Sequential(conv(3, 2)), nn.ReLU())
        ),
        [2],
    ),
    "inside of another model": (lambda: Around(four()), [4]),
    "with other layers between": (
        lambda: nn.Sequential(
            conv(2, 3), conv(3, 3), nn.ReLU(), nn.BatchNorm2d(3), conv(3, 3), nn.ReLU(), conv(3, 2), nn.MaxPool2d(2)
        ),
        [2, 2],
    ),
    "wider than the halo": (lambda: nn.Sequential(*(conv(2, 2, 5) for _ in range(5))), [3, 2]),
    "other settings": (
        lambda: nn.Sequential(
            conv(2, 4, (5, 3), bias=False), conv(4, 4, 1), nn.ReLU(), conv(4, 4, 3, groups=2, dilation=2), conv(4, 2, 1)
        ),
        [4],
    ),
    "a part of the halo is left over": (
        lambda: nn.Sequential(conv(2, 2), nn.ReLU(), conv(2, 2), nn.Tanh(), conv(2, 2), nn.Sigmoid(), conv(2, 2)),
        [2],
    ),
    "a layer that is used twice": (
        lambda: nn.Sequential(OrderedDict(a=(layer := conv(2, 2)), b=nn.ReLU(), c=layer, d=conv(2, 2))),
        [3],
    ),
}


@pytest.mark.parametrize("grid", [(2, 1), (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_a_chain_on_tiles_equals_one_rank(make, grid, chained):
    torch.manual_seed(0)
    net, lengths = make[0](), make[1]
    assert_parity(net, IMAGE, grid)
    assert sorted(chained) == sorted(lengths * (grid[0] * grid[1])), chained


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_memory_formats(memory_format, chained):
    x = numbers(IMAGE).contiguous(memory_format=memory_format)
    assert_parity(four().double().to(memory_format=memory_format), IMAGE, (2, 2), x=x)
    assert chained == [4] * 4


@pytest.mark.parametrize(
    ("layer", "shape", "grid"), [(nn.Conv1d, (2, 2, 31), (3,)), (nn.Conv3d, (1, 2, 9, 8, 10), (2, 1, 2))]
)
def test_images_of_other_dims(layer, shape, grid, chained):
    assert_parity(nn.Sequential(layer(2, 3, 3, padding=1), nn.ReLU(), layer(3, 2, 3, padding=1)), shape, grid)
    assert set(chained) == {2}


def in_blocks(last: int = 4) -> nn.Sequential:
    """A chain whose values stay in oneDNN's blocks, where there is oneDNN."""
    return nn.Sequential(conv(2, 16), nn.ReLU(), conv(16, 32), conv(32, 16), nn.ReLU(), conv(16, last), nn.ReLU())


@pytest.mark.parametrize("grid", [(2, 1), (2, 2)], ids=str)
def test_values_in_blocks_equal_one_rank(grid, monkeypatch):
    stayed: list[list[bool]] = []
    convolve = conv_fusion.convolve_in_chain

    def noting(x: Tensor, links: Any, parameters: Any) -> Tensor:
        stayed.append([link.stays for link in links])
        return convolve(x, links, parameters)

    monkeypatch.setattr(conv_fusion, "convolve_in_chain", noting)
    assert_parity(in_blocks(), IMAGE, grid, x=numbers(IMAGE, dtype=torch.float32), tolerance=1e-5)
    known = onednn_blocks._IS_KNOWN
    assert stayed == [[known, known, known, False]] * (grid[0] * grid[1])


def test_python_calls_grow_with_the_number_of_convolutions_and_no_faster():
    def calls_of_forward(count: int) -> int:
        layers = [layer for _ in range(count) for layer in (conv(IMAGE[1], IMAGE[1]), nn.ReLU())]

        def body(model: nn.Module, grid: ProcessGrid) -> int:
            x, calls = tile_of(numbers(IMAGE, dtype=torch.float32), grid), 0

            def count_call(frame: Any, event: str, argument: Any) -> None:
                nonlocal calls
                calls += event == "call" and "/torchmn/sharded/" in frame.f_code.co_filename

            model(x)
            sys.setprofile(count_call)
            try:
                model(x)
            finally:
                sys.setprofile(None)
            return calls

        return on_two_ranks(nn.Sequential(*layers), body)[0]

    first, second, third = calls_of_forward(16), calls_of_forward(32), calls_of_forward(64)
    assert third - second <= 2.1 * (second - first)


def test_a_hook_on_saved_tensors_sees_no_blocks():
    x = numbers(IMAGE, dtype=torch.float32)

    def body(model: nn.Module, grid: ProcessGrid) -> None:
        layouts: list[torch.layout] = []

        def pack(saved: Tensor) -> Tensor:
            layouts.append(saved.layout)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            hooked = model(tile_of(x, grid))
        assert set(layouts) == {torch.strided}
        assert_close(hooked.detach(), model(tile_of(x, grid)).detach(), "output", 1e-6)

    on_two_ranks(in_blocks(), body)


# -- what people do with models ----------------------------------------------------------------------------------------


def on_two_ranks(net: nn.Module, body: Callable[[nn.Module, ProcessGrid], Any]) -> list[Any]:
    """What `body` returns on each of two ranks for the parallel `net`."""

    def run(comm: torchmn.Communicator) -> Any:
        grid = ProcessGrid(comm, height=2)
        return body(parallelize(net, grid, "halopar", input_shape=IMAGE[1:], output="tile"), grid)

    return torchmn.run_threads(run, 2)


@pytest.mark.parametrize("frozen", [(), (0, 1), (2, 7), (0, 1, 2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("wants", [True, False], ids=["input gradient", "images"])
def test_frozen_parameters_have_no_gradient_and_all_others_theirs(frozen, wants):
    net, x = four().double(), numbers(IMAGE)
    for number, p in enumerate(net.parameters()):
        p.requires_grad_(number not in frozen)
    serial, whole = deepcopy(net), x.clone().requires_grad_(wants)
    serial(whole).square().sum().backward()

    def body(model: nn.Module, grid: ProcessGrid) -> None:
        tile = tile_of(x, grid).clone().requires_grad_(wants)
        model(tile).square().sum().backward()
        assert (tile.grad is not None) == wants
        if wants:
            assert_close(tile.grad, tile_of(whole.grad, grid), "input gradient", 1e-10)
        for name, g in gradients_of(model, grid.comm, grid).items():
            assert_close(g, serial.get_parameter(name).grad, name, 1e-10)

    on_two_ranks(net, body)


def test_second_derivatives_equal_one_rank():
    torch.manual_seed(3)
    net, x, weights = four().double(), numbers(IMAGE), numbers(IMAGE, 7)

    def penalty(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad((model(x) * weights).sum(), x, create_graph=True)
        g.pow(3).sum().backward()
        return g.detach()

    serial = deepcopy(net)
    expected = penalty(serial, x, weights)

    def body(model: nn.Module, grid: ProcessGrid) -> None:
        assert_close(
            penalty(model, tile_of(x, grid), tile_of(weights, grid)), tile_of(expected, grid), "gradient", 1e-9
        )
        for name, g in gradients_of(model, grid.comm, grid).items():
            assert_close(g, serial.get_parameter(name).grad, name, 1e-9)

    on_two_ranks(net, body)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = four()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(checkpoint(self.block, x, use_reentrant=False))


def test_a_chain_that_is_recomputed_equals_one_rank(chained):
    assert_parity(Recomputed(), IMAGE, (2, 1))
    assert chained == [4] * 4  # forward, and again in backward


def test_without_gradients_and_in_a_deep_copy(chained):
    net, x = four().double(), numbers(IMAGE)

    def body(model: nn.Module, grid: ProcessGrid) -> None:
        copied = deepcopy(model)
        with torch.no_grad():
            copied[0].weight.mul_(2)
            got, doubled = model.eval()(tile_of(x, grid)), copied(tile_of(x, grid))
        assert not got.requires_grad
        assert_close(got, tile_of(net(x), grid).detach(), "output", 1e-10)
        assert not torch.equal(got, doubled)  # each has its own layers

    on_two_ranks(Around(net).block, body)
    assert chained == [4] * 4


def test_a_replaced_layer_is_the_one_that_runs():
    net, other, x = four().double(), conv(3, 3, 1).double(), numbers(IMAGE)
    expected = deepcopy(net)
    expected[2] = other

    def body(model: nn.Module, grid: ProcessGrid) -> None:
        model(tile_of(x, grid))
        model[2] = deepcopy(other)
        assert_close(model(tile_of(x, grid)).detach(), tile_of(expected(x), grid).detach(), "output", 1e-10)

    on_two_ranks(net, body)


# -- who listens -------------------------------------------------------------------------------------------------------


def test_a_hook_on_one_rank_alone_sees_its_tile_and_changes_nothing_for_the_others(chained):
    net, x = four().double(), numbers(IMAGE)
    middle, expected = net[:3](x).detach(), net(x).detach()

    def body(model: nn.Module, grid: ProcessGrid) -> None:
        model(tile_of(x, grid))  # the first forward of a shape also runs without values
        seen: list[Tensor] = []
        if grid.comm.rank == 0:
            model[2].register_forward_hook(lambda _, __, y: seen.append(y.detach().clone().as_subclass(Tensor)))
        y = model(tile_of(x, grid))
        y.sum().backward()
        assert_close(y.detach(), tile_of(expected, grid), "output", 1e-10)
        for y in seen:
            assert_close(y, tile_of(middle, grid), "activation", 1e-10)
        assert len(seen) == (grid.comm.rank == 0)

    on_two_ranks(net, body)
    assert sorted(chained) == [2, 4, 4, 4]  # 2: behind the layer that is watched


def test_a_hook_in_front_of_a_layer_is_called_and_the_layer_may_write_to_its_input():
    net, x = four().double(), numbers(IMAGE)
    serial = deepcopy(net)
    serial(x).sum().backward()

    def body(model: nn.Module, grid: ProcessGrid) -> int:
        model(tile_of(x, grid))  # the first forward of a shape also runs without values
        calls: list[Any] = []
        model[3].register_forward_pre_hook(lambda *args: calls.append(args))
        model(tile_of(x, grid)).sum().backward()
        for name, g in gradients_of(model, grid.comm, grid).items():
            assert_close(g, serial.get_parameter(name).grad, name, 1e-10)
        return len(calls)

    assert on_two_ranks(net, body) == [1, 1]


class Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.called.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_every_convolution():
    def body(model: nn.Module, grid: ProcessGrid) -> int:
        x = tile_of(numbers(IMAGE, dtype=torch.float32), grid)
        model(x)  # the first forward of a shape also runs without values
        with Names() as mode:
            model(x)
        return mode.called.count("conv2d")

    assert on_two_ranks(four(), body) == [4, 4]


def test_a_hook_on_a_parameter_sees_the_gradient_that_the_parameter_gets():
    def body(model: nn.Module, grid: ProcessGrid) -> bool:
        seen: list[Tensor] = []
        model[2].weight.register_hook(seen.append)
        model(tile_of(numbers(IMAGE, dtype=torch.float32), grid)).sum().backward()
        return len(seen) == 1 and torch.equal(seen[0], model[2].weight.grad)

    assert on_two_ranks(four(), body) == [True, True]


# -- the function itself -----------------------------------------------------------------------------------------------


def test_the_gradients_of_a_chain_are_right_to_second_order():
    settings = ((1, 1), (1, 1), (1, 1), 1)
    kept = conv_chain.KeptOutputs((6, 5), ((2, 1, 3),), (((2, 0, 1),), ((2, 4, 2),)))
    for links in (
        [conv_chain.Link(*settings, True, kept), conv_chain.Link(*settings, False)],
        [conv_chain.Link(*settings, False), conv_chain.Link(*settings, True, kept)],
        [conv_chain.Link(*settings, True), conv_chain.Link(*settings, False, kept)],
    ):
        inputs = [
            numbers(shape, seed).requires_grad_() for seed, shape in enumerate([(1, 2, 6, 5), (2, 2, 3, 3), (2,)])
        ]

        def chain(x: Tensor, weight: Tensor, bias: Tensor, links: Any = links) -> Tensor:
            return conv_chain.convolve_in_chain(x, links, [weight, bias, weight.flip(0), None])

        assert torch.autograd.gradcheck(chain, inputs)
        assert torch.autograd.gradgradcheck(chain, inputs)


@ranks(2, 3, 4, on="mpi")
@ranks(2, on="gloo")
def test_a_chain_on_processes_equals_one_process(comm):
    torch.manual_seed(0)
    net = nn.Sequential(four(), nn.MaxPool2d(2)).double()
    x = numbers((2, 2, 75, 70))  # tiles large enough for a halo of three rows
    expected = run_serially(deepcopy(net), x)
    got = run_on_grid(comm, net, x, sizes_of({2: (2, 1), 3: (1, 3), 4: (2, 2)}[comm.size]), "halopar")
    assert_same(got, expected, f"rank {comm.rank} of {comm.size}", 1e-10)
