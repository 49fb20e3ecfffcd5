"""Trainer: the training loop over pretraining, epochs and batches, with checkpoints from which it resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from torchmn.experiment.run.clock import Clock
from torchmn.experiment.run.evaluation import evaluate
from torchmn.experiment.run.pretraining import PretrainingPosition, pretrain, pretrainer_of
from torchmn.experiment.run.session import Session
from torchmn.experiment.run.state import NamedOptimizer
from torchmn.parallel.global_state import GlobalModelState
from torchmn.training import Logger
from torchmn.training.checkpoint import MultiNodeCheckpointer


@dataclass
class Progress:
    """Position in training. `loss` is the sum over the `samples` of this epoch so far."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss: float = 0.0
    samples: int = 0
    pretrained: bool = False
    pretraining: PretrainingPosition = field(default_factory=PretrainingPosition)
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Trainer:
    """Trains a session, beginning at `progress`.

    Attributes:
        session: model, data and optimizer.
        log: receives loss and metrics.
        checkpointer: saves after each epoch, if given.
        stop: called after each step on every rank; True on one of them stops training on all.
        progress: current position.
    """

    session: Session
    log: Logger
    checkpointer: MultiNodeCheckpointer | None = None
    stop: Callable[[], bool] = lambda: False
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.clock = Clock(self.session.comm)

    def resume(self) -> bool:
        """Loads the newest checkpoint; returns False if there is none."""
        if self.checkpointer is None or self.checkpointer.maybe_load(**self._state()) is None:
            return False
        saved = dict(self.checkpointer.extra)
        self.progress = Progress(**{**saved, "pretraining": PretrainingPosition(**saved.get("pretraining", {}))})
        return True

    def run(self) -> bool:
        """Trains to the end; returns False if it was stopped before, after saving a checkpoint."""
        experiment, batches = self.session.experiment, self.session.batches
        model, here = self.session.placed.model, self.progress
        if not here.pretrained and not self._pretrain():
            return False
        model.train()
        while here.epoch < experiment.epochs:
            self.session.begin_epoch(here.epoch)
            order, began = batches.order(here.epoch), time.monotonic()
            first_step = here.step
            while here.batch < batches.steps:
                stopped = self._train_on(batches.rows(order, here.batch), began, first_step)
                if stopped:
                    self.save()
                    return False
            self._finish_epoch(time.monotonic() - began)
        return True

    def _pretrain(self) -> bool:
        """Runs the remaining pretraining, if any; returns False if it was stopped."""
        pretrainer, here = pretrainer_of(self.session), self.progress.pretraining
        if pretrainer is not None:
            done = f" ({here.step} done)" if here.step else ""
            self.log.print(f"pretraining: {pretrainer.steps} steps{done}")
            if not pretrain(pretrainer, here, self.log, self.stop, self.save):
                return False
        self.progress.pretrained = True
        if pretrainer is not None:
            self.save()
        return True

    def _train_on(self, rows: np.ndarray, began: float, first_step: int) -> bool:
        """Runs one step; returns whether to stop after it."""
        here, session = self.progress, self.session
        with self.clock:
            total, stops = session.placed.reduce_loss(float(session.train_on(rows, here.step)), self.stop())
        here.step += 1
        here.batch += 1
        here.loss += total * len(rows)
        here.samples += len(rows)
        rate = (here.step - first_step) * session.experiment.batch_size / max(time.monotonic() - began, 1e-9)
        self.log.step(step=here.step, loss=total, **{"samples/s": rate})
        return stops

    def _finish_epoch(self, seconds: float) -> None:
        here, session = self.progress, self.session
        values: dict[str, float] = {"epoch": here.epoch + 1, "loss": here.loss / max(here.samples, 1)}
        for split in session.split_measures:
            values.update({f"{split} {name}": value for name, value in evaluate(session, split).items()})
        rate = here.samples / max(seconds, 1e-9)
        self.log.epoch(**values, step=here.step, seconds=seconds, **{"samples/s": rate})
        here.history.append(values)
        here.epoch += 1
        here.batch, here.loss, here.samples = 0, 0.0, 0
        self.save()

    def save(self) -> None:
        """Saves a checkpoint, if there is a checkpointer."""
        if self.checkpointer is not None:
            self.checkpointer.save(self.progress.step, extra=asdict(self.progress), **self._state())

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.session.placed.model, self.session.optimizer
        return {"model": GlobalModelState(model), "optimizer": NamedOptimizer(optimizer, model)}
