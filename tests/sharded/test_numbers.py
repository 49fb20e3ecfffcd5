"""Other dtypes, memory formats, recomputation and no_grad: the numbers are those of one rank."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchmn
from tests.sharded.parity import assert_close, assert_parity, gradients_of, numbers
from torchmn import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.parallel import parallelize
from torchmn.sharded import Samples, image_layout, shard_like

IMAGE = (2, 3, 10, 9)


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.GroupNorm(2, 6),
        nn.SiLU(),
        nn.MaxPool2d(3, 1, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ConvTranspose2d(6, 4, 2, stride=2),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def test_single_precision():
    assert_parity(layers(), IMAGE, (2, 2), x=numbers(IMAGE, dtype=torch.float32), tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    x = numbers(IMAGE, dtype=dtype)
    assert_parity(layers().to(dtype), IMAGE, (2, 2), x=x, tolerance=0.05)
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.AdaptiveAvgPool2d(1))
    assert_parity(pooled, IMAGE, (2, 2), x=x, tolerance=torch.finfo(dtype).eps * 2)


def test_autocast():
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.adaptive_avg_pool2d(self.net(x), 4)

    assert_parity(Cast(), IMAGE, (2, 2), x=numbers(IMAGE, dtype=torch.float32), tolerance=0.03)


@pytest.mark.parametrize("grid", [(2, 2), (2, 3)], ids=str)
def test_channels_last(grid):
    x = numbers(IMAGE).contiguous(memory_format=torch.channels_last)
    assert_parity(layers().double().to(memory_format=torch.channels_last), IMAGE, grid, x=x)


def test_a_tile_that_is_a_view():
    x, net = numbers(IMAGE), layers().double()
    expected = net(x)

    def body(comm):
        grid = ProcessGrid(comm, height=2, width=2)
        layout = image_layout(grid, IMAGE, Samples(0, 2))
        tile = shard_like(x.mT.contiguous().mT, layout, {2: 2, 3: 3})
        assert not tile.is_contiguous()
        return parallelize(net, grid, "halopar", input_shape=IMAGE[1:])(tile)

    for got in torchmn.run_threads(body, 4):
        assert_close(got.detach(), expected.detach(), "output", 1e-10)


def test_recomputation_inside_the_model():
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(lambda x: F.relu(self.second(F.relu(self.first(x)))), x, use_reentrant=False)
            return y.flatten(1)

    assert_parity(Recomputed(), IMAGE, (2, 2))


def test_the_old_recomputation_is_refused():
    def body(comm):
        model = parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), _Old()), ProcessGrid(comm, height=2), "halopar")
        with pytest.raises(ParallelizeError, match="__set__"):
            model(numbers((2, 3, 5, 9), seed=comm.rank, dtype=torch.float32)).sum().backward()

    torchmn.run_threads(body, 2)


class _Old(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(F.relu, x, use_reentrant=True)


def test_without_gradients():
    x, net = numbers(IMAGE), layers().double()
    expected = deepcopy(net)(x).detach()

    def body(comm):
        model = parallelize(net, ProcessGrid(comm, height=2, width=2), "halopar", input_shape=IMAGE[1:])
        with torch.no_grad():
            first = model(x)
        with torch.inference_mode():
            return first, model(x).clone()

    for both in torchmn.run_threads(body, 4):
        for got in both:
            assert_close(torch.tensor(got.tolist(), dtype=got.dtype), expected, "output", 1e-10)


def test_a_batch_of_none():
    x = torch.zeros(0, 3, 10, 9, dtype=torch.float64)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 3)).double()
    assert_parity(net, x.shape, (2, 2), x=x)


def test_an_image_without_a_batch_is_refused():
    def body(comm):
        model = parallelize(nn.Conv2d(3, 4, 3), ProcessGrid(comm, width=2), "halopar")
        with pytest.raises(ParallelizeError, match="conv2d expects"):
            model(torch.zeros(3, 8, 4))

    torchmn.run_threads(body, 2)


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradients[0] * gate * (1 + x * (1 - gate))


def test_a_custom_autograd_function_that_saves_a_shard_is_refused():
    """Its backward gets this rank's gradient, but the saved tensor has the global shape: an error in the dry run."""
    with pytest.raises(ParallelizeError, match=r"_Swish .torch.autograd.Function. saves a cut tensor"):
        assert_parity(lambda x: _Swish.apply(F.avg_pool2d(x, 2)), IMAGE, (2, 2))


def test_gradients_of_gradients():
    """A gradient penalty: the sum over all pixels of the squared gradient of the output, differentiated again."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Softplus(), nn.AvgPool2d(2), nn.Conv2d(4, 2, 3)
    )
    net = nn.Sequential(*net, nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().sum()

    serial, x = deepcopy(net), numbers(IMAGE)
    penalty(serial, x.requires_grad_()).backward()

    def body(comm):
        grid = ProcessGrid(comm, height=2, width=2)
        model = parallelize(net, grid, "halopar", input_shape=IMAGE[1:])
        tile = shard_like(x.detach(), image_layout(grid, IMAGE, Samples(0, 2)), {2: 2, 3: 3}).requires_grad_()
        penalty(model, tile).backward()
        return gradients_of(model, comm, grid)

    for got in torchmn.run_threads(body, 4):
        for name, p in serial.named_parameters():
            assert_close(got[name], p.grad, name, 1e-10)
