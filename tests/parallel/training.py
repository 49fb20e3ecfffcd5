"""The same training on one rank and on a grid: losses of every step, and the state dict at the end."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchmn
from tests.parallel import models
from tests.sharded.parity import assert_close, numbers
from torchmn import Communicator, ProcessGrid
from torchmn.geometry import owned
from torchmn.parallel import full_state_dict, parallelize

STEPS, BATCH = 5, 6


@dataclass(frozen=True)
class Problem:
    """A model, and for which samples it is made."""

    make: Callable[[], nn.Module] = field(compare=False)
    name: str
    shape: tuple[int, ...]
    classes: int = 10
    dense: bool = False  # one class per pixel

    def model(self) -> nn.Module:
        """A copy of the model with its first parameters."""
        return deepcopy(first_model(self))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        x = numbers((BATCH, *self.shape), step)
        places = self.shape[1:] if self.dense else ()
        return x, numbers((BATCH, *places), 50 + step).mul(10).long().abs() % self.classes


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem(models.LeNet, "LeNet", (1, 28, 28)),
        Problem(models.vgg, "VGG", (3, 13, 15)),
        Problem(models.ResNet18, "ResNet-18", (3, 40, 33)),
        Problem(models.UNet, "U-Net", (2, 12, 16), classes=3, dense=True),
        Problem(models.mlp, "MLP", (1, 28, 28)),
    )
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


@lru_cache
def first_model(problem: Problem) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return problem.make().double()


@lru_cache
def serial_training(problem: Problem) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the last state of one rank; the generator is reset in every step.

    Ranks that are threads share torch's generator: call it once before they start.
    """
    model = problem.model()
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        x, y = problem.batch(step)
        with torch.random.fork_rng([]):
            torch.manual_seed(step)
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def tile_of(x: Tensor, grid: ProcessGrid) -> Tensor:
    """This rank's tile of images (batch, channel, *image)."""
    axes = grid.axes_of(x.dim() - 2)
    boxes = [owned(extent, grid.sizes[a], grid.place[a]) for extent, a in zip(x.shape[2:], axes, strict=True)]
    return x[(..., *(box.as_slice() for box in boxes))].contiguous()


def assert_trains_as_one_rank(comm: Communicator, problem: Problem, mode: str, **sizes: int) -> None:
    """Fail unless 5 steps on a grid of `sizes` have the losses, and leave the state, of one rank."""
    grid = ProcessGrid(comm, **sizes)
    model = parallelize(problem.model(), grid, mode, input_shape=problem.shape)
    optimizer = torchmn.create_multi_node_optimizer(optimizer_of(model), grid, model=model)
    expected_losses, expected_state = serial_training(problem)
    samples = owned(BATCH, grid.sizes["data"], grid.place["data"]).as_slice()
    for step in range(STEPS):
        x, y = (whole[samples] for whole in problem.batch(step))
        if comm.rank == 0 or not comm.traits.shares_process:
            torch.manual_seed(step)  # threads share one generator, of which rank 0 draws
        comm.barrier()
        loss = F.cross_entropy(model(tile_of(x, grid) if mode.startswith("halo") else x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = comm.allreduce(loss.detach(), "mean")
        assert abs(mean.item() - expected_losses[step]) < 1e-9, f"{problem.name}: loss of step {step}"
    state = full_state_dict(model)
    assert state.keys() == expected_state.keys()
    for key, expected in expected_state.items():
        assert_close(state[key].detach(), expected, f"{problem.name} on {grid!r}: {key}", 1e-9)
