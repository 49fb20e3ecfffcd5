"""The promise, tried out: a few steps on one rank and in every mode that fits, and how far their numbers are apart."""

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
from torchmn.experiment.run.evaluation import whole
from torchmn.experiment.run.grids import Shape, Sizes, Unfit
from torchmn.experiment.run.model import load_data
from torchmn.experiment.run.parallel import LOST
from torchmn.experiment.run.session import Session, open_session
from torchmn.experiment.run.state import global_gradients
from torchmn.experiment.vocabulary.schema import Experiment, Grid, Parallel
from torchmn.modes import MODES
from torchmn.parallel import full_state_dict

QUANTITIES = ("loss", "outputs", "gradients", "weights")
LARGEST = {"float64": 1e-9, "float32": 1e-4}
"""How far apart numbers may be, relative to the largest of them, and still be called the same."""


@dataclass(frozen=True)
class Numbers:
    """What a few steps gave: the loss of each, and at the end outputs, gradients and weights, all global."""

    losses: list[float]
    outputs: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One way to run the experiment. `deviations` is empty where `refusal` says why it does not work."""

    mode: str
    grid: str
    deviations: dict[str, float]
    refusal: str = ""
    largest: float = LARGEST["float64"]

    @property
    def passed(self) -> bool:
        return all(deviation <= self.largest for deviation in self.deviations.values())


def verify(experiment: Experiment, comm: Communicator, steps: int, data: str | None = None) -> Iterator[Row]:
    """A row for each mode and grid of the ranks of `comm`, as they are done; every rank must go through all of them."""
    alone = _placed_as(experiment, None, {})
    serial = Communicator(SoloTransport.of_world(Settings()))
    reference = on_rank_0(comm, "verify", lambda: _run(open_session(alone, serial, data), steps))
    shape = load_data(experiment, data)["train"].shape
    for mode, sizes in ways(comm.size, shape):
        try:
            session = open_session(_placed_as(experiment, mode, sizes), comm, data)
            numbers = _run(session, steps)
        except LOST:
            raise
        except TorchMNError as error:
            yield Row(mode, grids.described(sizes, mode), {}, refusal=str(error))
            continue
        largest = LARGEST[experiment.dtype]
        yield Row(mode, grids.described(sizes, mode), comm.bcast_obj(deviations(numbers, reference)), largest=largest)


def ways(size: int, shape: Shape) -> list[tuple[str, Sizes]]:
    """Every mode and, for images, several grids, on `size` ranks."""
    found: list[tuple[str, Sizes]] = []
    for mode in MODES:
        given: list[Sizes] = [{}]
        if mode == "halopar" and len(shape) == 3:
            given = [{"height": n, "width": size // n} for n in range(1, size + 1) if size % n == 0]
        for sizes in given:
            try:
                chosen = grids.grid_for(mode, size, shape, sizes)
            except Unfit:
                continue
            if (mode, chosen) not in found:
                found.append((mode, chosen))
    return found


def deviations(numbers: Numbers, reference: Numbers) -> dict[str, float]:
    """How far numbers are apart, relative to the largest of the reference's."""
    return {
        "loss": _apart(
            {"": torch.tensor(numbers.losses, dtype=torch.float64)},
            {"": torch.tensor(reference.losses, dtype=torch.float64)},
        ),
        "outputs": _apart({"": numbers.outputs}, {"": reference.outputs}),
        "gradients": _apart(numbers.gradients, reference.gradients),
        "weights": _apart(numbers.weights, reference.weights),
    }


def _placed_as(experiment: Experiment, mode: Any, sizes: Sizes) -> Experiment:
    used = {axis: count for axis, count in sizes.items() if count > 1}
    parallel = Parallel(mode=mode, grid=Grid(**used) if used else None)
    return experiment.model_copy(update={"parallel": parallel})


def _run(session: Session, steps: int) -> Numbers:
    """Train a few steps, and gather what came of it; every rank must call it."""
    batches, model = session.batches, session.placed.model
    session.begin_epoch(session.experiment.epochs - 1)  # where all of the model learns
    model.train()
    losses = []
    for number in range(steps):
        order = batches.order(number // batches.steps)
        rows = batches.rows(order, number % batches.steps)
        losses.append(session.placed.joined(float(session.train_on(rows, number)), False)[0])
    gradients = {name: gradient.detach().clone() for name, gradient in global_gradients(model).items()}
    model.eval()
    with torch.no_grad():
        inputs, targets = session.batch(session.splits["train"], batches.rows(batches.order(0), 0))
        outputs, _ = whole(session, [(session.placed.forward(inputs).values, targets)])
    return Numbers(losses, outputs.cpu(), gradients, {k: v.detach().clone() for k, v in full_state_dict(model).items()})


def _apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest number of all: what should be zero has no size of its own."""
    if {name: x.shape for name, x in ours.items()} != {name: x.shape for name, x in theirs.items()}:
        return float("inf")
    pairs = [(ours[name].double(), theirs[name].double()) for name in theirs if theirs[name].numel()]
    if not pairs:
        return 0.0
    apart = max(float((mine - other).abs().max()) for mine, other in pairs)
    size = max(float(other.abs().max()) for _, other in pairs)
    return apart / max(size, 1e-30) if isfinite(apart) and isfinite(size) else float("inf")
