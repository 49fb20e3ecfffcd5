"""Common expressions in a forward: the numbers of one rank on tiles and slices, or an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchmn
from tests.sharded.parity import assert_parity
from torchmn import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.parallel import parallelize

IMAGE = (2, 3, 9, 8)


class Behind(nn.Module):
    """A function behind a convolution, whose output is cut: into tiles, or by channels."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.conv(x))


WEIGHTS: dict[str, Callable[[Tensor], Any]] = {
    "a template": lambda x: F.conv2d(x.reshape(1, 8, 9, 8), x[:, :, 2:5, 3:6], groups=2),
    "a dynamic filter": lambda x: F.conv2d(x, F.adaptive_avg_pool2d(x, 3).mean(0).unsqueeze(1), padding=1, groups=4),
    "a transposed filter": lambda x: F.conv_transpose2d(x, x[0, :, :3, :3].unsqueeze(1), stride=2),
    "a filter of a whole image": lambda x: F.conv2d(x.new_ones(1, 4, 5, 5), x[:, :, :3, :3]),
    "a matrix": lambda x: F.linear(x.permute(0, 2, 3, 1), x.mean((0, 2, 3)).view(1, 4)),
    "pairs of channels": lambda x: x.unsqueeze(1) * x.unsqueeze(2),
}


@pytest.mark.parametrize(("mode", "grid"), [("halopar", (2, 2)), ("modelpar", (1, 3))])
@pytest.mark.parametrize("function", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_are_computed_from_the_image(function, mode, grid):
    assert_parity(Behind(function), IMAGE, grid, mode=mode)


def coordinates(x: Tensor) -> Tensor:
    rows, columns = (torch.linspace(-1, 1, extent, dtype=x.dtype) for extent in x.shape[-2:])
    return torch.cat([x, torch.stack(torch.meshgrid(rows, columns, indexing="ij")).expand(len(x), -1, -1, -1)], 1)


BLUR = torch.ones(4, 1, 3, 3, dtype=torch.float64) / 9
CONSTANTS: dict[str, Callable[[Tensor], Any]] = {
    "standardised": lambda x: (x - torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 4, 1, 1)) / torch.full((4, 1, 1), 0.3),
    "coordinates": coordinates,
    "a kernel that is not registered": lambda x: F.conv2d(x, BLUR, padding=1, groups=4) * BLUR[:, 0, :1, :1],
    "where": lambda x: torch.where(x > 0, x, torch.zeros(1, dtype=x.dtype)),
}


@pytest.mark.parametrize(("mode", "grid"), [("halopar", (2, 2)), ("modelpar", (1, 3))])
@pytest.mark.parametrize("function", CONSTANTS.values(), ids=CONSTANTS)
def test_constants_need_not_be_meta_tensors(function, mode, grid):
    assert_parity(Behind(function), IMAGE, grid, mode=mode)


class Remembers(nn.Module):
    """Keeps what it makes for an image of one shape, in an attribute and in a buffer, and counts its calls."""

    columns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 4, 3), 0
        self.ramp: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.ramp is None or self.ramp.shape[-2:] != x.shape[-2:]:
            self.ramp = torch.arange(float(x.shape[2] * x.shape[3]), device=x.device).view(x.shape[-2:])
            self.register_buffer("columns", torch.arange(float(x.shape[3]), device=x.device), persistent=False)
        return self.conv(x + self.ramp * 0.1 + self.columns) * self.calls


@pytest.mark.parametrize("mode", ["halopar", "modelpar"])
def test_attributes_that_forward_sets_are_not_meta_tensors(mode):
    assert_parity(Remembers(), IMAGE, (2, 2), mode=mode)


def zeroed(x: Tensor) -> Tensor:
    x[:, :, 2:5].zero_()
    return x


def raised(x: Tensor) -> Tensor:
    middle = x.narrow(3, 2, 3)[:, :2]
    middle += 1
    return x.sum() + middle.sum()


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "pairs of rows": (lambda x: x.unsqueeze(2) * x.unsqueeze(3), "along the same axis"),
    "rows of x in place": (zeroed, "changes a slice"),
    "a slice of columns in place": (raised, "changes a slice"),
    "torch.tensor": (lambda x: torch.tensor(x) * 2, r"torch\.tensor"),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize(("function", "words"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_wrong_is_refused(function, words):
    def body(comm):
        with pytest.raises(ParallelizeError, match=words):
            parallelize(Behind(function), ProcessGrid(comm, height=2, width=2), "halopar", input_shape=IMAGE[1:])

    torchmn.run_threads(body, 4)


@pytest.mark.parametrize("function", [zeroed, raised])
def test_a_slice_of_cut_channels_is_not_changed_in_place(function):
    def body(comm):
        with pytest.raises(ParallelizeError, match="changes a slice"):
            parallelize(Behind(function), comm, "modelpar", input_shape=IMAGE[1:])

    torchmn.run_threads(body, 2)


FLATTENED: dict[str, Callable[[Tensor], Any]] = {
    "normalised": lambda x: F.batch_norm(x.flatten(1), None, None, training=True),
    "softmax": lambda x: x.flatten(1).softmax(1),
    "joined": lambda x: torch.cat([x.flatten(1), x.mean((2, 3))], 1),
}


@pytest.mark.parametrize("function", FLATTENED.values(), ids=FLATTENED)
def test_channels_that_are_flattened_are_vectors_under_modelpar(function):
    assert_parity(Behind(function), IMAGE, (1, 2), mode="modelpar")


def test_one_column_is_flattened_with_its_rows():
    net = nn.Sequential(nn.Conv2d(3, 4, (1, 8)), nn.Flatten(), nn.Linear(36, 3))
    assert_parity(net, IMAGE, (2, 3))


@pytest.mark.guard("images_in_objects")
def test_an_image_in_an_object_is_refused():
    class OfBatch(nn.Conv2d):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch.image)

    def body(comm):
        model = parallelize(OfBatch(3, 4, 3), ProcessGrid(comm, height=2), "halopar")
        with pytest.raises(ParallelizeError, match="cannot be found and cut"):
            model(SimpleNamespace(image=torch.zeros(2, 3, 4, 8)))

    torchmn.run_threads(body, 2)


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / gradient.norm() + gradient.mean((2, 3), keepdim=True))
    return x * x


@pytest.mark.parametrize("mode", ["halopar", "modelpar"])
def test_a_hook_sees_the_gradient_of_the_whole_image(mode):
    assert_parity(Behind(hooked), IMAGE, (2, 2), mode=mode)


def test_a_rank_without_outputs_may_be_followed_by_a_change_in_place():
    """One column of outputs for three ranks."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1, dilation=3), nn.ReLU(inplace=True), nn.MaxPool2d((2, 1)), nn.ReLU6(True)
    )
    assert_parity(net, (2, 3, 12, 5), (2, 3))


def test_a_slice_may_be_changed_where_it_alone_is_used_on():
    assert_parity(Behind(lambda x: x[:, :, 1:-1].add_(1).relu_() + 1), IMAGE, (2, 2))
    assert_parity(Behind(lambda x: F.pad(x, (0, 0, 0, 0)).mul_(2) + x), IMAGE, (2, 2))
    assert_parity(Behind(lambda x: x.narrow(1, 1, 2).mul_(2)), IMAGE, (1, 2), mode="modelpar")
