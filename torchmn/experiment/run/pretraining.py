"""Pretraining: parts of a model are trained one after the other, without labels, before the whole model is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from torchmn.data.batches import BatchSchedule
from torchmn.experiment.run.session import Session, seed_of
from torchmn.experiment.vocabulary.layers.boltzmann import (
    Boltzmann,
    boltzmann_layers,
    contrastive_divergence,
    layer_input,
)
from torchmn.models import PretrainingProgress, SparseAutoencoder
from torchmn.models import pretrain as pretrain_stack
from torchmn.training import Logger


@dataclass
class PretrainingPosition:
    """Position in pretraining. `sums` are the costs, by name, over the `samples` of this epoch so far."""

    part: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    sums: dict[str, float] = field(default_factory=dict)


class StopRequested(Exception):
    """The user has requested a stop. Raised on all ranks."""


StepCallback = Callable[[dict[str, float]], None]
"""Called after each step with its costs per sample, over all ranks."""


class Pretrainer(ABC):
    """Pretrains one kind of model, part by part."""

    part_name: ClassVar[str]
    epochs: list[int]
    """Number of epochs of each part."""

    def __init__(self, session: Session):
        self.session = session
        experiment, self.data = session.experiment, session.splits["train"]
        self.batches = BatchSchedule(len(self.data), experiment.batch_size, drop_last=experiment.drop_last)

    @property
    def steps(self) -> int:
        """Total number of steps."""
        return sum(self.epochs) * self.batches.steps

    def rows(self, first: int) -> Iterator[np.ndarray]:
        """Yields the rows of each batch, from batch `first` on, in the order of the data set."""
        order = self.batches.order(0)
        for number in range(first, self.batches.steps):
            yield self.batches.rows(order, number)

    @abstractmethod
    def finish_epoch(self, here: PretrainingPosition, after_step: StepCallback) -> None:
        """Trains on the remaining batches of this epoch, and calls `after_step` after each."""


class _Images:
    """Iterable over this rank's part of the images of each batch, from batch `first` on."""

    def __init__(self, pretrainer: Pretrainer, first: int):
        self.pretrainer, self.first = pretrainer, first

    def __iter__(self) -> Iterator[Tensor]:
        for rows in self.pretrainer.rows(self.first):
            yield self.pretrainer.session.batch(self.pretrainer.data, rows)[0]


class StackPretrainer(Pretrainer):
    """Trains the stacks of a sparse autoencoder to reconstruct their inputs."""

    part_name = "stack"

    def __init__(self, session: Session):
        super().__init__(session)
        spec, model = session.experiment.model.autoencoder, session.placed.model
        assert isinstance(model, SparseAutoencoder) and spec is not None
        self.model, self.lr = model, spec.pretraining.lr
        self.epochs = [spec.pretraining.epochs] * len(spec.kernels)

    def finish_epoch(self, here: PretrainingPosition, after_step: StepCallback) -> None:
        def progress(step: PretrainingProgress) -> None:
            cost = step.cost
            after_step({"reconstruction": cost.reconstruction, "sparsity": cost.sparsity, "cost": cost.total})

        images = _Images(self, here.batch)
        pretrain_stack(self.model, images, epochs=1, learning_rate=self.lr, stacks=[here.part], progress=progress)


class BoltzmannPretrainer(Pretrainer):
    """Trains the restricted Boltzmann machines of a model by contrastive divergence, from the lowest to the highest."""

    part_name = "rbm"

    def __init__(self, session: Session):
        super().__init__(session)
        self.machines: list[Boltzmann] = boltzmann_layers(session.placed.model)
        self.epochs = [machine.epochs for machine in self.machines]

    def finish_epoch(self, here: PretrainingPosition, after_step: StepCallback) -> None:
        session, machine = self.session, self.machines[here.part]
        for rows in self.rows(here.batch):
            visible = layer_input(session.placed.model, machine, session.batch(self.data, rows)[0])
            seed = seed_of(session.experiment.seed, f"rbm/{here.step}")
            cost = contrastive_divergence(machine, visible, seed, len(rows), session.placed.replicas)
            after_step({"reconstruction": cost, "cost": cost})


def pretrainer_of(session: Session) -> Pretrainer | None:
    """Returns the pretrainer of the session's model, or None if nothing is to be pretrained."""
    if session.experiment.model.autoencoder is not None:
        pretrainer: Pretrainer = StackPretrainer(session)
    elif boltzmann_layers(session.placed.model):
        pretrainer = BoltzmannPretrainer(session)
    else:
        return None
    return pretrainer if pretrainer.steps else None


def pretrain(
    pretrainer: Pretrainer, here: PretrainingPosition, log: Logger, stop: Callable[[], bool], save: Callable[[], None]
) -> bool:
    """Pretrains from `here` to the end. Every rank must call it.

    Args:
        pretrainer: of the model.
        here: current position, which is updated.
        log: receives the costs.
        stop: called after each step; True on one rank stops all.
        save: called after each epoch and when stopped, to save a checkpoint.

    Returns:
        False if it was stopped.
    """

    def after_step(costs: dict[str, float]) -> None:
        _advance(pretrainer, here, costs)
        stops = pretrainer.session.placed.reduce_loss(0.0, stop())[1]
        # Steps of pretraining have a separate counter; step 0 places them before all training steps.
        log.step(step=0, **_log_position(pretrainer, here), **costs)
        if stops:
            raise StopRequested

    while here.part < len(pretrainer.epochs):
        while here.epoch < pretrainer.epochs[here.part]:
            try:
                pretrainer.finish_epoch(here, after_step)
            except StopRequested:
                save()
                return False
            means = {name: total / max(here.samples, 1) for name, total in here.sums.items()}
            log.epoch(**_log_position(pretrainer, here), **means, step=0)
            here.epoch, here.batch, here.samples, here.sums = here.epoch + 1, 0, 0, {}
            save()
        here.part, here.epoch = here.part + 1, 0
    return True


def _log_position(pretrainer: Pretrainer, here: PretrainingPosition) -> dict[str, int]:
    return {pretrainer.part_name: here.part + 1, "pretraining": here.epoch + 1, "pretraining step": here.step}


def _advance(pretrainer: Pretrainer, here: PretrainingPosition, costs: dict[str, float]) -> None:
    samples = min(pretrainer.batches.batch_size, pretrainer.batches.count - here.batch * pretrainer.batches.batch_size)
    for name, cost in costs.items():
        here.sums[name] = here.sums.get(name, 0.0) + cost * samples
    here.samples += samples
    here.batch += 1
    here.step += 1
