"""verify: trains a few steps on one rank and in every mode that fits, and compares the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.transports.group import Settings
from torchmn.communicators.transports.solo import SoloTransport
from torchmn.errors import TorchMNError
from torchmn.experiment.run import grids
from torchmn.experiment.run.agreement import on_rank_0
from torchmn.experiment.run.evaluation import gather_batches
from torchmn.experiment.run.grids import GridError, Shape, Sizes
from torchmn.experiment.run.model import load_data
from torchmn.experiment.run.parallel import FATAL_ERRORS
from torchmn.experiment.run.session import Session, open_session
from torchmn.experiment.run.state import global_gradients
from torchmn.experiment.vocabulary.schema import Experiment, Grid, Parallel
from torchmn.modes import MODES
from torchmn.parallel import full_state_dict

QUANTITIES = ("loss", "outputs", "gradients", "weights")
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
"""Largest difference, relative to the largest value, at which numbers count as the same."""


@dataclass(frozen=True)
class StepResults:
    """Global tensors after a few steps: the loss of each step; outputs, gradients and weights after the last."""

    losses: list[float]
    outputs: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class ModeResult:
    """The differences of one mode and grid from one rank, or the reason why it is not possible.

    Attributes:
        mode: name of the mode.
        grid: description of the process grid.
        deviations: relative differences, one for each of QUANTITIES; empty if the mode is not possible.
        refusal: the error if the mode is not possible.
        tolerance: largest deviation of a mode that passes.
    """

    mode: str
    grid: str
    deviations: dict[str, float]
    refusal: str = ""
    tolerance: float = TOLERANCES["float64"]

    @property
    def passed(self) -> bool:
        return all(deviation <= self.tolerance for deviation in self.deviations.values())


def verify(experiment: Experiment, comm: Communicator, steps: int, data: str | None = None) -> Iterator[ModeResult]:
    """Yields the result of each mode and grid. Every rank must call it, and iterate to the end.

    Args:
        experiment: its mode and grid are ignored.
        comm: the ranks to compare with one rank.
        steps: number of training steps.
        data: directory of the data set.
    """
    alone = _with_mode(experiment, None, {})
    serial = Communicator(SoloTransport.of_world(Settings()))
    reference = on_rank_0(comm, "verify", lambda: _run(open_session(alone, serial, data), steps))
    shape = load_data(experiment, data)["train"].shape
    for mode, sizes in configurations(comm.size, shape):
        grid = grids.description(sizes, mode)
        try:
            session = open_session(_with_mode(experiment, mode, sizes), comm, data)
            results = _run(session, steps)
        except FATAL_ERRORS:
            raise
        except TorchMNError as error:
            yield ModeResult(mode, grid, {}, refusal=str(error))
            continue
        differences = comm.bcast_obj(deviations(results, reference))
        yield ModeResult(mode, grid, differences, tolerance=TOLERANCES[experiment.dtype])


def configurations(size: int, shape: Shape) -> list[tuple[str, Sizes]]:
    """Returns the possible modes on `size` ranks with a grid for each; halopar with every two-dimensional grid."""
    found: list[tuple[str, Sizes]] = []
    for mode in MODES:
        given: list[Sizes] = [{}]
        if mode == "halopar" and len(shape) == 3:
            given = [{"height": n, "width": size // n} for n in range(1, size + 1) if size % n == 0]
        for sizes in given:
            try:
                grid = grids.grid_for(mode, size, shape, sizes)
            except GridError:
                continue
            if (mode, grid) not in found:
                found.append((mode, grid))
    return found


def deviations(results: StepResults, reference: StepResults) -> dict[str, float]:
    """Returns the largest difference of each quantity, relative to the largest value of the reference."""
    return {
        "loss": _relative_difference(
            {"": torch.tensor(results.losses, dtype=torch.float64)},
            {"": torch.tensor(reference.losses, dtype=torch.float64)},
        ),
        "outputs": _relative_difference({"": results.outputs}, {"": reference.outputs}),
        "gradients": _relative_difference(results.gradients, reference.gradients),
        "weights": _relative_difference(results.weights, reference.weights),
    }


def _with_mode(experiment: Experiment, mode: Any, sizes: Sizes) -> Experiment:
    used = {axis: count for axis, count in sizes.items() if count > 1}
    parallel = Parallel(mode=mode, grid=Grid(**used) if used else None)
    return experiment.model_copy(update={"parallel": parallel})


def _run(session: Session, steps: int) -> StepResults:
    """Trains a few steps and gathers the results. Every rank must call it."""
    batches, model = session.batches, session.placed.model
    session.begin_epoch(session.experiment.epochs - 1)  # the epoch in which no parameter is frozen
    model.train()
    losses = []
    for number in range(steps):
        order = batches.order(number // batches.steps)
        rows = batches.rows(order, number % batches.steps)
        losses.append(session.placed.reduce_loss(float(session.train_on(rows, number)), False)[0])
    gradients = {name: gradient.detach().clone() for name, gradient in global_gradients(model).items()}
    model.eval()
    with torch.no_grad():
        inputs, targets = session.batch(session.splits["train"], batches.rows(batches.order(0), 0))
        outputs, _ = gather_batches(session, [(session.placed.forward(inputs).values, targets)])
    weights = {name: tensor.detach().clone() for name, tensor in full_state_dict(model).items()}
    return StepResults(losses, outputs.cpu(), gradients, weights)


def _relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest difference, relative to the largest value of all tensors: some should be zero."""
    if {name: x.shape for name, x in found.items()} != {name: x.shape for name, x in expected.items()}:
        return float("inf")
    pairs = [(found[name].double(), expected[name].double()) for name in expected if expected[name].numel()]
    if not pairs:
        return 0.0
    difference = max(float((x - y).abs().max()) for x, y in pairs)
    size = max(float(y.abs().max()) for _, y in pairs)
    return difference / max(size, 1e-30) if isfinite(difference) and isfinite(size) else float("inf")
