"""One halo exchange for a run of convolutions: the numbers of one rank, with fewer messages."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
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
from torchmn.sharded.fusion import wide_halo

GRIDS = ((1, 2), (2, 1), (2, 2), (2, 3), (3, 3))


@pytest.fixture(autouse=True)
def small_tiles_too(monkeypatch):
    let_small_tiles_have_wide_halos(monkeypatch)


class Wired(nn.Module):
    """Four convolutions, connected by a function."""

    def __init__(self, forward: Callable[..., Any]):
        super().__init__()
        self.a, self.b, self.c, self.d = conv(2, 3), conv(3, 3, padding=1), conv(3, 3), conv(3, 3, bias=False)
        self.wires = forward

    def forward(self, x: Tensor) -> Any:
        return self.wires(self, x)


def residual(net: Wired, x: Tensor) -> Tensor:
    h = net.a(x).relu()
    return net.c(h + 0.5 * net.b(h)) - h


def residual_in_place(net: Wired, x: Tensor) -> Tensor:
    h = net.a(x)
    y = net.c(F.relu(net.b(h), inplace=True))
    y += h
    return net.d(y.mul_(0.7).relu_())


def concatenated(net: Wired, x: Tensor) -> Tensor:
    h = F.silu(net.a(x))
    both = torch.cat([h, net.b(h)], 1)
    return net.c(both[:, 1:4]) + F.conv2d(both, net.d.weight.repeat(1, 2, 1, 1), padding=1)


def gated(net: Wired, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.d(torch.sigmoid(net.b(h)) * torch.tanh(net.c(h)))


def looped(net: Wired, x: Tensor) -> Tensor:
    x = net.a(x)
    for _ in range(5):
        x = torch.tanh(net.b(x))
    return x


def two_outputs(net: Wired, x: Tensor) -> tuple[Tensor, Tensor]:
    h = net.b(net.a(x))
    return h.mean((2, 3)), net.d(net.c(h))


def recomputed(net: Wired, x: Tensor) -> Tensor:
    h = net.a(x)
    y = checkpoint(lambda h: F.relu(net.c(F.relu(net.b(h)))), h, use_reentrant=False)
    return net.d(y) + checkpoint(lambda x: net.b(net.a(x)), x, use_reentrant=False)


def changed_in_place(net: Wired, x: Tensor) -> Tensor:
    h = net.a(x)
    h.data.mul_(2)
    y = net.b(h)
    y.mul_(torch.arange(x.shape[3], dtype=x.dtype, device=x.device))
    return net.d(net.c(y.add_(h)).exp_())


def operands_by_name(net: Wired, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.d(torch.add(net.b(h), other=h, alpha=2).mul_(other=net.c(h)))


def partly_without_gradient(net: Wired, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.b(net.a(x))
    return net.d(net.c(h) + h.detach())


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "two": lambda: nn.Sequential(conv(2, 3), nn.ReLU(), conv(3, 2)),
    "five kinds of kernels": lambda: nn.Sequential(
        conv(2, 4, 5, padding=2),
        nn.GELU(),
        conv(4, 4, (3, 1), padding=(1, 0), groups=2),
        nn.ReLU(inplace=True),
        conv(4, 2, 1),
        nn.LeakyReLU(0.2),
        conv(2, 2, 3, dilation=2),
        nn.ELU(inplace=True),
        conv(2, 3, (1, 3)),
    ),
    "more than one exchange": lambda: nn.Sequential(*(conv(2, 2, 5) for _ in range(5))),
    "a padding that grows the image ends a run": lambda: nn.Sequential(
        conv(2, 2), conv(2, 2), conv(2, 2, 3, padding=2), conv(2, 2), conv(2, 2)
    ),
    "other layers end a run": lambda: nn.Sequential(
        conv(2, 2), conv(2, 4), nn.BatchNorm2d(4), conv(4, 4), nn.Hardswish(), conv(4, 4), nn.MaxPool2d(2), nn.Flatten()
    ),
    "residual": lambda: Wired(residual),
    "residual in place": lambda: Wired(residual_in_place),
    "concatenated": lambda: Wired(concatenated),
    "gated": lambda: Wired(gated),
    "looped": lambda: Wired(looped),
    "two outputs": lambda: Wired(two_outputs),
    "recomputed": lambda: Wired(recomputed),
    "changed in place": lambda: Wired(changed_in_place),
    "operands by name": lambda: Wired(operands_by_name),
    "partly without gradient": lambda: Wired(partly_without_gradient),
}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_chain_on_tiles_equals_one_rank(chain, grid):
    torch.manual_seed(0)
    assert_parity(chain(), IMAGE, grid)


FILTERS = numbers((3, 2, 2, 2))
BEHIND: dict[str, Callable[[Tensor], Any]] = {
    "reshape": lambda x: x.reshape(len(x), -1),
    "permute": lambda x: x.permute(0, 2, 3, 1) * 2,
    "rows": lambda x: x[:, :, 3:9],
    "dropout": lambda x: F.dropout(x, 0.4),
    "pool": lambda x: F.avg_pool2d(x, 3, 2),
    "norm": lambda x: F.layer_norm(x.movedim(1, -1), (3,)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "logarithm": lambda x: torch.log(x - x.detach().amin() + 1),
    "upsampling": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "reflection": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "transposed convolution": lambda x: F.conv_transpose2d(x, FILTERS, stride=2),
    "softmax": lambda x: x.softmax(1),
    "stack": lambda x: torch.stack([x, x + 1], 1).sum(1),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("function", BEHIND.values(), ids=BEHIND)
def test_functions_without_support_for_wide_halos_compute_on_the_tile(function, memory_format):
    """In the middle of a run and at its end."""
    net = Wired(lambda net, x: (function(h := net.b(net.a(x))), function(net.d(net.c(h)).tanh())))
    x = numbers(IMAGE).contiguous(memory_format=memory_format)
    assert_parity(net.double().to(memory_format=memory_format), IMAGE, (2, 2), x=x)


@pytest.mark.parametrize(
    ("layer", "shape", "grid"),
    [
        (nn.Conv1d, (2, 2, 31), (3,)),
        (nn.Conv3d, (1, 2, 9, 8, 10), (2, 1, 2)),
        (nn.Conv2d, (5, 2, 13, 9), {"data": 2, "height": 2}),
    ],
    ids=["1D", "3D", "micro-batches"],
)
def test_images_of_other_dims_and_micro_batches(layer, shape, grid):
    net = nn.Sequential(layer(2, 3, 3, padding=1), nn.Tanh(), layer(3, 2, 3, padding=1), nn.Sigmoid(), layer(2, 2, 1))
    assert_parity(net, shape, grid)


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
def test_a_layer_that_draws_in_training_is_in_the_way_only_then(train):
    assert_parity(nn.Sequential(conv(2, 3), nn.Dropout(0.3), conv(3, 2), conv(2, 2)), IMAGE, (2, 2), train=train)


LAYERS = st.one_of(
    st.builds(lambda k, d: ("conv", k, d), st.sampled_from([1, 3, 5]), st.sampled_from([1, 2])),
    st.sampled_from([("relu",), ("tanh",), ("skip",), ("pool",), ("log",)]),
)


class Random(nn.Module):
    def __init__(self, layers: list[tuple]):
        super().__init__()
        self.layers = layers
        self.convs = nn.ModuleList(
            conv(2, 2, sizes[0], dilation=sizes[1]) if sizes else nn.Identity() for _, *sizes in layers
        )

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for (kind, *_), layer in zip(self.layers, self.convs, strict=True):
            if kind == "conv":
                before, x = x, layer(x)
            elif kind == "skip":
                x = x + before if x.shape == before.shape else x
            elif kind == "pool":
                x = F.max_pool2d(x, 3, 1, 1)
            elif kind == "log":
                x = torch.log(x.square() + 1)
            else:
                x = getattr(torch, kind)(x)
        return x


@settings(max_examples=20, deadline=None)
@given(layers=st.lists(LAYERS, min_size=2, max_size=8), grid=st.sampled_from(GRIDS), rows=st.integers(9, 20))
def test_any_chain_equals_one_rank(layers, grid, rows):
    torch.manual_seed(1)
    assert_parity(Random(layers), (1, 2, rows, 17), grid)


# -- messages ----------------------------------------------------------------------------------------------------


def exchanges(comm: Any, run: Callable[[], Any]) -> int:
    before = comm.group.collectives
    run()
    return comm.group.collectives - before


@pytest.mark.parametrize("wants", [False, True], ids=["images", "with a gradient"])
def test_a_chain_of_four_makes_one_exchange(wants):
    def body(comm):
        grid = ProcessGrid(comm, height=2, width=2)
        counts = {}
        for length in (1, 4):
            net = nn.Sequential(*(nn.Sequential(conv(2, 2), nn.ReLU()) for _ in range(length)))
            model = parallelize(net, grid, "halopar", input_shape=IMAGE[1:], output="tile")
            x = torch.rand(2, 2, *((12, 11)[grid.place["height"]], 10)).requires_grad_(wants)
            model(x)  # the first forward of a shape is preceded by a dry run
            outputs = []
            forward = exchanges(grid.tiles, lambda: outputs.append(model(x)))  # noqa: B023
            backward = exchanges(grid.tiles, lambda: outputs[0].sum().backward())  # noqa: B023
            counts[length] = forward, backward
        return counts

    for counts in torchmn.run_threads(body, 4):
        assert counts[4] == counts[1] == (2, int(wants))  # forward: the comparison of the call, and the exchange


def test_a_copy_of_the_model_and_evaluation_make_one_exchange_too():
    def body(comm):
        grid = ProcessGrid(comm, height=2)
        net = nn.Sequential(conv(2, 2), nn.ReLU(), conv(2, 2), conv(2, 2))
        model = deepcopy(parallelize(net, grid, "halopar", input_shape=IMAGE[1:], output="tile")).eval()
        x = torch.rand(2, 2, 12 - comm.rank, 20)
        with torch.no_grad():
            model(x)
            return exchanges(grid.tiles, lambda: model(x))

    assert torchmn.run_threads(body, 2) == [2, 2]


def test_the_limits_keep_a_halo_small_beside_its_tile(monkeypatch):
    monkeypatch.setattr(wide_halo, "LARGEST_SHARE", 1 / 8)
    monkeypatch.setattr(wide_halo, "MOST_ROWS", 4)

    def body(comm):
        net = nn.Sequential(*(conv(1, 1) for _ in range(6)))
        widths = []
        for rows in (128, 40, 20):
            model = parallelize(net, ProcessGrid(comm, height=2), "halopar", input_shape=(1, rows, 8))
            widths.append({name: set(by_image.values()) for name, by_image in model.parallelism.learned.items()})
        return widths

    for large, small, smallest in torchmn.run_threads(body, 2):
        assert large == {"0.weight": {(4, 0)}, "4.weight": {(2, 0)}}
        assert small == {f"{at}.weight": {(2, 0)} for at in (0, 2, 4)}
        assert smallest == {}  # a halo of one row serves one convolution, which overlaps it with its work


# -- what people do with activations and gradients -----------------------------------------------------------------


def smooth() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(conv(2, 3), nn.Tanh(), conv(3, 3), nn.Softplus(), conv(3, 2)).double()


def test_second_derivatives_equal_one_rank():
    x, weights, net = numbers(IMAGE), numbers(IMAGE, 7), smooth()

    def penalty(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad((model(x) * weights).sum(), x, create_graph=True)
        g.pow(3).sum().backward()
        assert x.grad is not None
        return x.grad

    serial = deepcopy(net)
    expected = penalty(serial, x, weights)

    def body(comm):
        grid = ProcessGrid(comm, height=2, width=2)
        model = parallelize(net, grid, "halopar", input_shape=IMAGE[1:], output="tile")
        got = penalty(model, tile_of(x, grid), tile_of(weights, grid))
        assert_close(got, tile_of(expected, grid), "input gradient", 1e-9)
        for name, g in gradients_of(model, comm, grid).items():
            assert_close(g, serial.get_parameter(name).grad, name, 1e-9)

    torchmn.run_threads(body, 4)


def test_a_hook_on_a_tile_gets_the_whole_gradient_of_the_tile():
    x, net = numbers(IMAGE), smooth()

    def gradient_of_the_middle(model: nn.Module, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        model[1].register_forward_hook(lambda _, __, y: y.register_hook(seen.append) and None)
        model(x).square().sum().backward()
        return seen[0].as_subclass(Tensor)  # on tiles, a hook gets a part

    expected = gradient_of_the_middle(deepcopy(net), x)

    def body(comm):
        grid = ProcessGrid(comm, height=2, width=2)
        model = parallelize(net, grid, "halopar", input_shape=IMAGE[1:], output="tile")
        got = gradient_of_the_middle(model, tile_of(x, grid))
        assert_close(got, tile_of(expected, grid), "gradient of an activation", 1e-9)

    torchmn.run_threads(body, 4)


def test_a_forward_hook_sees_the_tile_and_the_result_can_be_viewed():
    x, net = numbers(IMAGE), nn.Sequential(conv(2, 2), conv(2, 2)).double()
    middle = net[0](x)

    def body(comm):
        grid = ProcessGrid(comm, height=2, width=2)
        model = parallelize(net, grid, "halopar", input_shape=IMAGE[1:], output="tile")
        seen: list[Tensor] = []
        model[0].register_forward_hook(lambda _, __, y: seen.append(y.detach().clone()))
        y = model(tile_of(x, grid))
        assert_close(y.view(-1), tile_of(net(x), grid).reshape(-1), "output", 1e-10)
        assert_close(seen[-1].as_subclass(Tensor), tile_of(middle, grid), "activation", 1e-10)

    torchmn.run_threads(body, 4)


def test_autocast_casts_as_on_one_rank():
    x, net = numbers(IMAGE, dtype=torch.float32), smooth().float()

    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    expected = run(net, x)

    def body(comm):
        grid = ProcessGrid(comm, height=2)
        model = parallelize(net, grid, "halopar", input_shape=IMAGE[1:], output="tile")
        y = run(model, tile_of(x, grid))
        assert y.dtype == torch.bfloat16
        assert_close(y.detach(), tile_of(expected, grid).detach(), "output", 2e-2)
        y.float().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    torchmn.run_threads(body, 2)


@ranks(2, 3, 4, on="mpi")
@ranks(2, on="gloo")
def test_a_chain_on_processes_equals_one_process(comm):
    torch.manual_seed(0)
    net = nn.Sequential(conv(2, 3), nn.ReLU(True), conv(3, 3), nn.SiLU(), conv(3, 3), nn.MaxPool2d(2)).double()
    x = numbers((2, 2, 75, 70))  # tiles large enough for a halo of three rows
    expected = run_serially(deepcopy(net), x)
    got = run_on_grid(comm, net, x, sizes_of({2: (2, 1), 3: (1, 3), 4: (2, 2)}[comm.size]), "halopar")
    assert_same(got, expected, f"rank {comm.rank} of {comm.size}", 1e-10)
