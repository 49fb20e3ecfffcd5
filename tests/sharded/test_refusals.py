"""Functions without a rule raise an error that names them, on every rank, before any computation or communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchmn
from tests._worlds.agreements import recorded_agreements
from torchmn import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.parallel import parallelize

IMAGE = (4, 8, 6)


class Inner(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Model(nn.Module):
    """A layer that can be cut, followed by one that cannot."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.first, self.block = nn.Conv2d(4, 4, 3, padding=1), nn.Sequential(nn.ReLU(), Inner(function))

    def forward(self, x: Tensor) -> Any:
        return self.block(self.first(x))


def changed(x: Tensor) -> Tensor:
    x[:, :, 2:4] = 0
    return x


CASES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "unfold": (lambda x: F.unfold(x, 3), "'unfold'"),
    "fft": (lambda x: torch.fft.fft2(x).real, "'fft_fft2'"),
    "einsum": (lambda x: torch.einsum("bchw->bc", x), "'einsum'"),
    "matmul": (lambda x: x @ x.transpose(2, 3), "'matmul'"),
    "grid_sample": (lambda x: F.grid_sample(x, x.new_zeros(2, 3, 3, 2), align_corners=False), "'grid_sample'"),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), "bicubic"),
    "antialias": (lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True), "antialias=True"),
    "cat along a cut dim": (lambda x: torch.cat([x, x], 2), "cat along dim 2"),
    "argmax of all": (lambda x: x.argmax(), "argmax without one dim"),
    "argmax of rows": (lambda x: x.argmax(2), "argmax along dim 2"),
    "max of columns": (lambda x: x.max(-1), "max along dim -1"),
    "softmax of columns": (lambda x: x.softmax(-1), "softmax over dims (3,)"),
    "mean of rows": (lambda x: x.mean(2), "mean over dims (2,)"),
    "pool with indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), "max_pool2d_with_indices"),
    "fractional pool": (lambda x: F.fractional_max_pool2d(x, 2, output_size=3), "fractional_max_pool2d"),
    "a list as index": (lambda x: x[:, [0, 2]], "index [0, 2] of dim 1"),
    "a row": (lambda x: x[:, :, 3], "index 3 of dim 2"),
    "assignment": (changed, "'__setitem__'"),
    "topk of rows": (lambda x: x.topk(2, 2), "topk along dim 2"),
    "unbind of rows": (lambda x: torch.stack(x.unbind(2)), "unbind along dim 2"),
    "sort of rows": (lambda x: x.sort(2), "sort along dim 2"),
    "flip": (lambda x: x.flip(3), "flip along a cut dim"),
    "repeat": (lambda x: x.repeat(1, 1, 2, 1), "repeat"),
    "batch into channels": (lambda x: x.flatten(0, 2), "cannot become"),
    "half of a dim": (lambda x: x.view(2, 4, 2, 4, 6), "cannot become"),
    "batch moved": (lambda x: x.permute(1, 0, 2, 3), "moves the batch dim"),
    "channels from rows": (lambda x: F.conv2d(x.permute(0, 2, 1, 3), x.new_ones(1, 8, 1, 1)), "channels in dim 1"),
    "different cuts": (lambda x: x[:, :, :6] + x[:, :, :6].transpose(2, 3), "cut in different ways"),
    "a whole tensor in place": (lambda x: torch.zeros(2, 4, 8, 6, device=x.device).add_(x), "change a whole tensor"),
    "out": (lambda x: torch.mul(x.detach(), 2, out=torch.empty_like(x).detach()), "out= of 'mul'"),
    "random": (lambda x: x + torch.rand_like(x), "'rand_like'"),
    "alpha dropout": (lambda x: F.alpha_dropout(x, 0.5, True), "alpha dropout"),
    "loss of parts": (lambda x: F.mse_loss(x, x * 2), "'mse_loss'"),
    "values": (lambda x: x if x.sum() > 0 else -x, "may depend on values"),
}


@pytest.mark.parametrize(("function", "words"), CASES.values(), ids=CASES)
def test_a_function_without_a_rule_is_refused_by_name_on_every_rank(function, words):
    net = Model(function)

    def body(comm):
        with pytest.raises(ParallelizeError) as refusal:
            parallelize(net, ProcessGrid(comm, height=2, width=2), "halopar", input_shape=IMAGE)
        return str(refusal.value)

    with recorded_agreements() as names:
        messages = torchmn.run_threads(body, 4)
    for message in messages:
        assert words in message
        assert "block.1" in message or "may depend on values" in message
    assert {*names} <= {"ProcessGrid", "parallelize", "bcast_data", "allgather_obj"}  # and no forward


def test_an_error_for_another_image_shape_comes_before_its_forward():
    net = Model(lambda x: x[:, :, :6] + x[:, :, :6].transpose(2, 3) if x.shape[2] > 8 else x)

    def body(comm):
        model = parallelize(net, ProcessGrid(comm, height=2, width=2), "halopar")
        model(torch.randn(2, 4, 4, 3))  # its tile of 8 x 6
        with pytest.raises(ParallelizeError, match=r"block\.1"):
            model(torch.randn(2, 4, 5, 3))

    torchmn.run_threads(body, 4)


def test_an_error_names_the_layer_even_inside_another_module():
    class Holder(nn.Module):
        def __init__(self, comm: Any, function: Callable[[Tensor], Any], **options: Any):
            super().__init__()
            self.head = nn.Linear(2, 2)
            self.net = parallelize(Model(function), ProcessGrid(comm, height=2), "halopar", **options)

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    def body(comm):
        with pytest.raises(ParallelizeError, match=r"^block\.1 \(Inner\("):
            Holder(comm, lambda x: F.unfold(x, 3), input_shape=IMAGE)
        holder = Holder(comm, lambda x: F.unfold(x, 3) if x.shape[2] == 10 else x)
        with pytest.raises(ParallelizeError, match=r"^block\.1 \(Inner\("):
            holder(torch.randn(2, 4, 5, 6))

    torchmn.run_threads(body, 2)


def test_indices_of_the_batch_are_refused_where_ranks_have_other_samples():
    def body(comm):
        with pytest.raises(ParallelizeError, match="an index of the batch"):
            parallelize(Model(lambda x: x[0]), ProcessGrid(comm, data=2, width=2), "halodatapar", input_shape=IMAGE)

    torchmn.run_threads(body, 4)


def test_a_cut_vector_is_not_changed_in_place():
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.first(x))
            y[:, 0] = 0
            return self.second(y)

    x = torch.randn(4, 6)
    net = Changes()
    expected = net(x)

    def body(comm):
        try:
            return parallelize(net, comm, "modelpar", input_shape=(6,))(x)
        except ParallelizeError as refusal:
            assert "__setitem__" in str(refusal)  # noqa: PT017  (either is right: the value, or the refusal)
            return expected

    for got in torchmn.run_threads(body, 2):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, x], 5),
        lambda x: torch.stack([x, x], 6),
        lambda x: x.narrow(5, 0, 1),
        lambda x: x.select(5, 0),
        lambda x: x.index_select(5, torch.tensor([0])),
        lambda x: x.mean(4),
        lambda x: x.sum((1, -5)),
        lambda x: x.softmax(4),
        lambda x: x.unsqueeze(7),
        lambda x: x.flatten(5),
        lambda x: x.roll(1, 4),
        lambda x: x.unbind(4),
        lambda x: F.glu(x, 5),
    ],
)
def test_a_dim_that_does_not_exist_is_an_error_as_on_one_rank(function):
    model = Model(function)
    with pytest.raises(IndexError, match="out of range"):
        model(torch.zeros(2, *IMAGE))

    def body(comm):
        with pytest.raises(ParallelizeError, match="out of range"):
            parallelize(model, ProcessGrid(comm, height=2), "halopar")(torch.zeros(2, 4, 4, 6))

    torchmn.run_threads(body, 2)
