"""Custom autograd functions and backward hooks on sharded tensors: right, or an error in the dry run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchmn
from tests.sharded.parity import Applied, assert_parity
from torchmn import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.parallel import parallelize

IMAGE = (2, 3, 9, 8)
MODES = [("halopar", {"height": 2}), ("modelpar", {"width": 3})]


class Reversed(torch.autograd.Function):
    """The gradient reversal of domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.5 * grads[0]


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-1, 1)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] - grads[0].mean()


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@pytest.mark.parametrize(("mode", "sizes"), MODES)
@pytest.mark.parametrize("function", [Reversed, StraightThrough])
def test_an_elementwise_custom_autograd_function_is_allowed(function, mode, sizes):
    net = nn.Sequential(nn.Conv2d(3, 3, 3), Applied(function.apply), nn.Conv2d(3, 2, 3))
    assert_parity(net, IMAGE, sizes, mode=mode)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "keeps a part": (Squared.apply, "Squared .torch.autograd.Function. saves a cut tensor"),
    "looks at all elements": (Centred.apply, "Centred .torch.autograd.Function. calls 'mean' of a cut tensor"),
    "TorchScript": (lambda x: scripted(x), "TorchScript function 'scripted'"),
    "vmap": (lambda x: torch.vmap(lambda sample: sample - sample.mean())(x), "torch function '(mean|sum)[^']*'"),
}


@pytest.mark.guard("CustomAutograd")
@pytest.mark.parametrize(("mode", "sizes"), MODES)
@pytest.mark.parametrize(("function", "words"), REFUSED.values(), ids=REFUSED)
def test_custom_autograd_functions_that_are_not_elementwise_are_refused(function, words, mode, sizes):
    assert_refused(nn.Sequential(nn.Conv2d(3, 3, 3), Applied(function), nn.Conv2d(3, 2, 3)), mode, sizes, words)


@pytest.mark.guard("CustomAutograd")
@pytest.mark.parametrize(("mode", "sizes"), MODES)
def test_a_full_backward_hook_is_refused(mode, sizes):
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    net[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] / inner[0].norm(),))
    assert_refused(net, mode, sizes, "a full backward hook would get this rank's shard")


def assert_refused(net: nn.Module, mode: str, sizes: dict[str, int], words: str) -> None:
    def body(comm):
        with pytest.raises(ParallelizeError, match=words):
            parallelize(net, ProcessGrid(comm, **sizes), mode, input_shape=IMAGE[1:])

    torchmn.run_threads(body, max(sizes.values()))


def test_torchscript_functions_still_run_on_plain_tensors():
    assert_parity(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 2, 3)), IMAGE)  # a parallel model was here
    x = torch.ones(3)
    torch.testing.assert_close(scripted(x), F.silu(x))
