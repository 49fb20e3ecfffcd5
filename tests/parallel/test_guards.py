"""Every guard of parallel models raises its error, and models compute the same numbers without guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmn
from tests._worlds.jobs import run_job, without_package
from tests.fusion.test_optional import MODEL
from torchmn import ProcessGrid
from torchmn.errors import MismatchError, ParallelizeError
from torchmn.parallel import GUARDS, parallelize

IMAGE = torch.arange(2.0 * 16 * 8).view(2, 1, 16, 8)


class Applied(nn.Module):
    """A convolution, and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


def on_tiles(comm: Any, model: nn.Module) -> nn.Module:
    return parallelize(model, ProcessGrid(comm, height=2), "halopar", input_shape=(1, 16, 8))


def changed_view(comm: Any) -> None:
    def change(x: Tensor) -> Tensor:
        x[:, :, :2].zero_()
        return x * 2

    on_tiles(comm, Applied(change))


def compiled_submodule(comm: Any) -> None:
    model = on_tiles(comm, nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)))
    model[0].compile()
    model.train(not model.training)  # another kind of forward, so that it is traced
    model(IMAGE)


class CenteredByHand(torch.autograd.Function):
    """Not element by element: its backward needs the gradient of the whole."""

    @staticmethod
    def forward(ctx, x):
        return x - x.mean()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean()


def own_function(comm: Any) -> None:
    on_tiles(comm, Applied(CenteredByHand.apply))


def _halved(x: Tensor) -> Tensor:
    return x - x.mean()


SCRIPT = torch.jit.script(_halved)


def script(comm: Any) -> None:
    on_tiles(comm, Applied(lambda x: SCRIPT(x)))


class RunningMean(nn.Module):
    """A buffer that is computed of the samples that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(x.mean().detach())
        return self.linear(x)


def average_of_its_own(comm: Any) -> None:
    parallelize(RunningMean(), ProcessGrid(comm, data=2), "datapar")(torch.full((3, 4), float(comm.rank)))


def other_labels(comm: Any) -> None:
    model = on_tiles(comm, nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)))
    labels = torch.full((2, 1, 16, 8), float(comm.rank))
    (model(IMAGE) - labels).square().mean().backward()


def plain_step(comm: Any) -> None:
    model = parallelize(nn.Linear(4, 2), ProcessGrid(comm, data=2), "datapar")
    model(torch.ones(3, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


class CenteredSamples(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def centered_samples(comm: Any) -> None:
    parallelize(CenteredSamples(4, 2), ProcessGrid(comm, data=2), "datapar")(torch.full((3, 4), float(comm.rank)))


def call_outside(comm: Any) -> None:
    on_tiles(comm, nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)))[0](IMAGE[:, :, :8])


def traced(comm: Any) -> None:
    model = on_tiles(comm, nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)))
    torch.func.grad(lambda x: model(x).sum())(IMAGE)


def embedding_of_a_batch(comm: Any) -> None:
    parallelize(nn.Sequential(nn.Embedding(7, 4, max_norm=1.0)), comm, "datapar")


class Batch:
    def __init__(self) -> None:
        self.images = IMAGE


class OfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, batch: Batch) -> Tensor:
        return self.conv(batch.images)


def image_in_an_object(comm: Any) -> None:
    parallelize(OfBatch(), ProcessGrid(comm, height=2), "halopar")(Batch())


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.conv(x).detach()
        return self.last


def buffer_of_a_tile(comm: Any) -> None:
    on_tiles(comm, Remembering())


CASES: dict[str, tuple[Callable[[Any], None], type[Exception], str]] = {
    "InplaceViews": (changed_view, ParallelizeError, "changes a slice or view of a cut tensor in place"),
    "CompiledSubmodules": (compiled_submodule, ParallelizeError, "0 was compiled"),
    "CustomAutograd": (own_function, ParallelizeError, "CenteredByHand .* of a cut tensor"),
    "TorchScript": (script, ParallelizeError, "the TorchScript function '_halved'"),
    "ShardedBuffers": (
        buffer_of_a_tile,
        ParallelizeError,
        "the buffer last is set to a tensor",
    ),
    "batch_dependent_embeddings": (
        embedding_of_a_batch,
        ParallelizeError,
        "max_norm depends on the ids of the whole batch",
    ),
    "images_in_objects": (image_in_an_object, ParallelizeError, "got Batch, in which they cannot be found"),
    "buffer_averages": (average_of_its_own, MismatchError, "ranks differ in the buffers mean"),
    "different_losses": (other_labels, MismatchError, "different gradients of the model's output"),
    "plain_optimizer": (plain_step, ParallelizeError, "SGD.step on a parallel model"),
    "sample_mixing": (centered_samples, ParallelizeError, "mean combines samples of the batch"),
    "submodule_calls": (call_outside, ParallelizeError, "was called outside of the forward of its parallel model"),
    "tracing": (traced, ParallelizeError, r"torch.func .* of a parallel model"),
}

GUARDS.load()
pytestmark = pytest.mark.guard


@pytest.mark.parametrize("name", [*GUARDS.entries()])
def test_a_guard_raises_its_error_and_can_be_removed(name: str) -> None:
    provoke, error, text = CASES[name]
    with pytest.raises(error, match=text):
        torchmn.run_threads(provoke, 2)
    guard = GUARDS.entries()[name]
    assert guard.why
    with GUARDS.without(name):
        assert guard not in GUARDS.by_event[guard.event]
    assert guard in GUARDS.by_event[guard.event]


def test_every_guard_has_a_case() -> None:
    assert set(CASES) == set(GUARDS.entries())


def test_a_model_computes_the_same_numbers_without_guards() -> None:
    result = run_job(without_package("torchmn.parallel.guards") + MODEL, 1, "solo")
    assert result.returncode == 0, result.output
