"""Pretraining: parts of a model learn one after the other, without labels, before all of it learns with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from torchmn.experiment.batches import Batches
from torchmn.experiment.boltzmann import Boltzmann, contrastive_divergence, input_of, machines
from torchmn.experiment.randomness import seed_of
from torchmn.experiment.session import Session
from torchmn.models import SparseAutoencoder
from torchmn.models.placement import Placement
from torchmn.models.pretraining import pretraining_step
from torchmn.training import Logger


@dataclass
class Position:
    """How far a pretraining is; `sums` are the costs of this epoch so far, over its `samples`."""

    part: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    sums: dict[str, float] = field(default_factory=dict)


class Pretrainer(ABC):
    """What a kind of model does in one step of its pretraining."""

    part_name: ClassVar[str]
    epochs: list[int]
    """How often each part goes over the data."""

    def __init__(self, session: Session):
        self.session = session
        experiment, self.data = session.experiment, session.splits["train"]
        self.batches = Batches(len(self.data), experiment.batch_size, drop_last=experiment.drop_last)

    @property
    def steps(self) -> int:
        """How many steps there are in all."""
        return sum(self.epochs) * self.batches.steps

    @abstractmethod
    def step(self, part: int, rows: np.ndarray, number: int) -> dict[str, float]:
        """Learn from the samples at `rows`; gives the costs per sample, of all ranks together."""


class Stacks(Pretrainer):
    """The stacks of a sparse autoencoder learn to reconstruct their inputs."""

    part_name = "stack"

    def __init__(self, session: Session):
        super().__init__(session)
        spec, model = session.experiment.the_model().autoencoder, session.placed.model
        assert isinstance(model, SparseAutoencoder)
        self.model, self.lr = model, spec.pretraining.lr
        self.placement = Placement(model, model.in_shape)
        self.epochs = [spec.pretraining.epochs] * len(spec.kernels)

    def step(self, part: int, rows: np.ndarray, number: int) -> dict[str, float]:
        images = self.placement.part(self.session.batch(self.data, rows)[0])
        inputs = self.model.features(images, part).detach()
        copies = self.placement.sum_over_copies
        cost, _ = pretraining_step(self.model.stacks[part], inputs, self.model.sparsity, self.lr, copies)  # type: ignore[arg-type]
        return {"reconstruction": cost.reconstruction, "sparsity": cost.sparsity, "cost": cost.total}


class Machines(Pretrainer):
    """The restricted Boltzmann machines of a model learn by contrastive divergence, from the lowest to the highest."""

    part_name = "rbm"

    def __init__(self, session: Session):
        super().__init__(session)
        self.machines: list[Boltzmann] = machines(session.placed.model)
        self.epochs = [machine.epochs for machine in self.machines]

    def step(self, part: int, rows: np.ndarray, number: int) -> dict[str, float]:
        session, machine = self.session, self.machines[part]
        visible = input_of(session.placed.model, machine, session.batch(self.data, rows)[0])
        seed = seed_of(session.experiment.seed, f"rbm/{number}")
        cost = contrastive_divergence(machine, visible, seed, len(rows), session.placed.replicas)
        return {"reconstruction": cost, "cost": cost}


def pretrainer_of(session: Session) -> Pretrainer | None:
    """What pretrains the session's model; None if nothing does."""
    if session.experiment.the_model().autoencoder is not None:
        found: Pretrainer = Stacks(session)
    elif machines(session.placed.model):
        found = Machines(session)
    else:
        return None
    return found if found.steps else None


def pretrain(
    pretrainer: Pretrainer, here: Position, log: Logger, stop: Callable[[], bool], save: Callable[[], None]
) -> bool:
    """Pretrain from `here` to the end; False if the user stopped it before. Every rank must call it.

    A checkpoint is saved after each epoch, and where it is stopped: from there it goes on exactly.
    """
    batches, order = pretrainer.batches, pretrainer.batches.order(0)
    while here.part < len(pretrainer.epochs):
        while here.epoch < pretrainer.epochs[here.part]:
            while here.batch < batches.steps:
                if _step(pretrainer, here, batches.rows(order, here.batch), log, stop):
                    save()
                    return False
            _finish_epoch(pretrainer, here, log)
            save()
        here.part, here.epoch = here.part + 1, 0
    return True


def _step(pretrainer: Pretrainer, here: Position, rows: np.ndarray, log: Logger, stop: Callable[[], bool]) -> bool:
    costs = pretrainer.step(here.part, rows, here.step)
    for name, cost in costs.items():
        here.sums[name] = here.sums.get(name, 0.0) + cost * len(rows)
    here.samples += len(rows)
    here.batch += 1
    here.step += 1
    # The steps of the training are counted on their own: all of these come before its first.
    values = {pretrainer.part_name: here.part + 1, "pretraining": here.epoch + 1, "pretraining step": here.step}
    stops = pretrainer.session.placed.joined(0.0, stop())[1]
    log.step(step=0, **values, **costs)
    return stops


def _finish_epoch(pretrainer: Pretrainer, here: Position, log: Logger) -> None:
    means = {name: total / max(here.samples, 1) for name, total in here.sums.items()}
    here.epoch += 1
    values = {pretrainer.part_name: here.part + 1, "pretraining": here.epoch, "pretraining step": here.step}
    log.epoch(**values, **means, step=0)
    here.batch, here.samples, here.sums = 0, 0, {}
