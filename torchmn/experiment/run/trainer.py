"""Trainer: the training loop over pretraining, epochs and batches, with checkpoints from which it resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np

from torchmn.experiment.run.clock import Clock
from torchmn.experiment.run.evaluation import evaluate
from torchmn.experiment.run.pretraining import PretrainingPosition, pretrain, pretrainer_of
from torchmn.experiment.run.session import Session
from torchmn.experiment.run.state import NamedOptimizer
from torchmn.parallel.clipping import gradient_norm
from torchmn.parallel.global_state import GlobalModelState
from torchmn.training import Logger
from torchmn.training.checkpoint import MultiNodeCheckpointer

LEARNING_RATE, GRADIENT_NORM = "learning rate", "gradient norm"
"""Names in the history and the log, where they follow the losses and metrics of an epoch."""


@dataclass
class Progress:
    """Position in training.

    Attributes:
        epoch: number of complete epochs.
        batch: number of steps of this epoch.
        step: number of all steps.
        loss: sum over the `samples` of this epoch so far.
        samples: number of samples of this epoch so far.
        gradient_norm: of the last whole batch.
        pretrained: whether pretraining is complete.
        pretraining: position in pretraining.
        history: loss, metrics, learning rate and gradient norm of each epoch.
        started: date and time of the beginning of the run, UTC; the same on all ranks.
        seconds: that the run has taken until it was saved, without the time between an interruption and the resumption.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss: float = 0.0
    samples: int = 0
    gradient_norm: float = float("nan")
    pretrained: bool = False
    pretraining: PretrainingPosition = field(default_factory=PretrainingPosition)
    history: list[dict[str, float]] = field(default_factory=list)
    started: str = ""
    seconds: float = 0.0


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
        self._resumed_at = time.monotonic()

    def resume(self) -> bool:
        """Loads the newest checkpoint; returns False if there is none."""
        if self.checkpointer is None or self.checkpointer.maybe_load(**self._state()) is None:
            return False
        saved = dict(self.checkpointer.extra)
        self.progress = Progress(**{**saved, "pretraining": PretrainingPosition(**saved.get("pretraining", {}))})
        return True

    def run(self) -> bool:
        """Trains to the end; returns False if it was stopped before, after saving a checkpoint.

        When it returns, the last checkpoint is complete.
        """
        finished = self._train()
        if self.checkpointer is not None:
            self.checkpointer.wait()
        return finished

    def _train(self) -> bool:
        experiment, batches = self.session.experiment, self.session.batches
        model, here = self.session.placed.model, self.progress
        if not here.started:
            now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
            here.started = self.session.comm.bcast_obj(now)  # equal on all ranks, as is all that a checkpoint holds
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

    def seconds(self) -> float:
        """Returns the seconds that the run has taken, on this rank."""
        return self.progress.seconds + time.monotonic() - self._resumed_at

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
        if here.batch == session.batches.last_whole:
            here.gradient_norm = gradient_norm(session.placed.model)
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
        values |= {**learning_rates(session), GRADIENT_NORM: here.gradient_norm}
        rate = here.samples / max(seconds, 1e-9)
        self.log.epoch(**values, step=here.step, seconds=seconds, **{"samples/s": rate})
        here.history.append(values)
        here.epoch += 1
        here.batch, here.loss, here.samples = 0, 0.0, 0
        self.save()

    def save(self) -> None:
        """Saves a checkpoint, if there is a checkpointer."""
        if self.checkpointer is not None:
            seconds = self.session.comm.bcast_obj(self.seconds())
            extra = {**asdict(self.progress), "seconds": seconds}
            self.checkpointer.save(self.progress.step, extra=extra, **self._state())

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.session.placed.model, self.session.optimizer
        return {"model": GlobalModelState(model), "optimizer": NamedOptimizer(optimizer, model)}


def learning_rates(session: Session) -> dict[str, float]:
    """Returns the learning rate of this epoch; if layers have different ones, numbered from the second on."""
    rates = {group.get("first_lr", group["lr"]): float(group["lr"]) for group in session.optimizer.param_groups}
    names = (LEARNING_RATE if number == 1 else f"{LEARNING_RATE} {number}" for number in range(1, len(rates) + 1))
    return dict(zip(names, rates.values(), strict=True))
