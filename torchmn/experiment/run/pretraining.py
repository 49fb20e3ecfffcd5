"""Pretraining: parts of a model learn one after the other, without labels, before all of it learns with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from torchmn.data.batches import Batches
from torchmn.experiment.run.session import Session, seed_of
from torchmn.experiment.vocabulary.layers.boltzmann import Boltzmann, contrastive_divergence, input_of, machines
from torchmn.models import PretrainingProgress, SparseAutoencoder
from torchmn.models import pretrain as pretrain_stack
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


class Stopped(Exception):
    """The user wants to stop; all ranks know it."""


Done = Callable[[dict[str, float]], None]
"""Takes the costs per sample of a step that is done, those of all ranks together."""


class Pretrainer(ABC):
    """How a kind of model is pretrained."""

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

    def rows(self, first: int) -> Iterator[np.ndarray]:
        """The samples of each batch, from the batch `first` on, in the order of the data."""
        order = self.batches.order(0)
        for number in range(first, self.batches.steps):
            yield self.batches.rows(order, number)

    @abstractmethod
    def finish_epoch(self, here: Position, done: Done) -> None:
        """Learn from each batch that is left of this epoch, and call `done` after it."""


class _Images:
    """This rank's part of the images of each batch from the batch `first` on, as often as they are asked for."""

    def __init__(self, pretrainer: Pretrainer, first: int):
        self.pretrainer, self.first = pretrainer, first

    def __iter__(self) -> Iterator[Tensor]:
        for rows in self.pretrainer.rows(self.first):
            yield self.pretrainer.session.batch(self.pretrainer.data, rows)[0]


class Stacks(Pretrainer):
    """The stacks of a sparse autoencoder learn to reconstruct their inputs."""

    part_name = "stack"

    def __init__(self, session: Session):
        super().__init__(session)
        spec, model = session.experiment.the_model().autoencoder, session.placed.model
        assert isinstance(model, SparseAutoencoder)
        self.model, self.lr = model, spec.pretraining.lr
        self.epochs = [spec.pretraining.epochs] * len(spec.kernels)

    def finish_epoch(self, here: Position, done: Done) -> None:
        def told(step: PretrainingProgress) -> None:
            cost = step.cost
            done({"reconstruction": cost.reconstruction, "sparsity": cost.sparsity, "cost": cost.total})

        images = _Images(self, here.batch)
        pretrain_stack(self.model, images, epochs=1, learning_rate=self.lr, stacks=[here.part], progress=told)


class Machines(Pretrainer):
    """The restricted Boltzmann machines of a model learn by contrastive divergence, from the lowest to the highest."""

    part_name = "rbm"

    def __init__(self, session: Session):
        super().__init__(session)
        self.machines: list[Boltzmann] = machines(session.placed.model)
        self.epochs = [machine.epochs for machine in self.machines]

    def finish_epoch(self, here: Position, done: Done) -> None:
        session, machine = self.session, self.machines[here.part]
        for rows in self.rows(here.batch):
            visible = input_of(session.placed.model, machine, session.batch(self.data, rows)[0])
            seed = seed_of(session.experiment.seed, f"rbm/{here.step}")
            cost = contrastive_divergence(machine, visible, seed, len(rows), session.placed.replicas)
            done({"reconstruction": cost, "cost": cost})


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

    def done(costs: dict[str, float]) -> None:
        _count(pretrainer, here, costs)
        stops = pretrainer.session.placed.joined(0.0, stop())[1]
        # The steps of the training are counted on their own: all of these come before its first.
        log.step(step=0, **_place(pretrainer, here), **costs)
        if stops:
            raise Stopped

    while here.part < len(pretrainer.epochs):
        while here.epoch < pretrainer.epochs[here.part]:
            try:
                pretrainer.finish_epoch(here, done)
            except Stopped:
                save()
                return False
            means = {name: total / max(here.samples, 1) for name, total in here.sums.items()}
            log.epoch(**_place(pretrainer, here), **means, step=0)
            here.epoch, here.batch, here.samples, here.sums = here.epoch + 1, 0, 0, {}
            save()
        here.part, here.epoch = here.part + 1, 0
    return True


def _place(pretrainer: Pretrainer, here: Position) -> dict[str, int]:
    return {pretrainer.part_name: here.part + 1, "pretraining": here.epoch + 1, "pretraining step": here.step}


def _count(pretrainer: Pretrainer, here: Position, costs: dict[str, float]) -> None:
    samples = min(pretrainer.batches.batch_size, pretrainer.batches.count - here.batch * pretrainer.batches.batch_size)
    for name, cost in costs.items():
        here.sums[name] = here.sums.get(name, 0.0) + cost * samples
    here.samples += samples
    here.batch += 1
    here.step += 1
