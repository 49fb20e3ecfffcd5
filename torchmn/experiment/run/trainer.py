"""The training loop: batches, epochs, checkpoints, and an end that can be gone on from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torchmn.experiment.run.clock import Clock
from torchmn.experiment.run.evaluation import evaluate
from torchmn.experiment.run.pretraining import Position, pretrain, pretrainer_of
from torchmn.experiment.run.session import Session
from torchmn.experiment.run.state import NamedOptimizer
from torchmn.parallel.global_state import WholeModel
from torchmn.training import Logger
from torchmn.training.checkpoint import MultiNodeCheckpointer


@dataclass
class Progress:
    """How far a training is. `loss` is the sum over the samples of this epoch so far."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss: float = 0.0
    samples: int = 0
    pretrained: bool = False
    pretraining: Position = field(default_factory=Position)
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Trainer:
    """Trains a session, from where its progress is.

    stop: asked after each step on every rank; True on one of them ends the training on all
    """

    session: Session
    log: Logger
    checkpointer: MultiNodeCheckpointer | None = None
    stop: Callable[[], bool] = lambda: False
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.clock = Clock(self.session.comm)

    def resume(self) -> bool:
        """Go on from the newest checkpoint; False if there is none."""
        if self.checkpointer is None or self.checkpointer.maybe_load(**self._state()) is None:
            return False
        saved = dict(self.checkpointer.extra)
        self.progress = Progress(**{**saved, "pretraining": Position(**saved.get("pretraining", {}))})
        return True

    def run(self) -> bool:
        """Train to the end; False if it was stopped before, in which case a checkpoint was saved."""
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
        """Pretrain what is to be pretrained; False if it was stopped: then it goes on from there."""
        pretrainer, here = pretrainer_of(self.session), self.progress.pretraining
        if pretrainer is not None:
            gone = f", {here.step} of them done" if here.step else ""
            self.log.print(f"pretraining, {pretrainer.steps} steps{gone}")
            if not pretrain(pretrainer, here, self.log, self.stop, self.save):
                return False
        self.progress.pretrained = True
        if pretrainer is not None:
            self.save()
        return True

    def _train_on(self, rows: Any, began: float, first_step: int) -> bool:
        """One step; whether to stop after it."""
        here, session = self.progress, self.session
        with self.clock:
            total, stops = session.placed.joined(float(session.train_on(rows, here.step)), self.stop())
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
        for split in session.measured:
            values.update({f"{split} {name}": value for name, value in evaluate(session, split).items()})
        rate = here.samples / max(seconds, 1e-9)
        self.log.epoch(**values, step=here.step, seconds=seconds, **{"samples/s": rate})
        here.history.append(values)
        here.epoch += 1
        here.batch, here.loss, here.samples = 0, 0.0, 0
        self.save()

    def save(self) -> None:
        """Save a checkpoint, if there is where to."""
        if self.checkpointer is not None:
            self.checkpointer.save(self.progress.step, extra=asdict(self.progress), **self._state())

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.session.placed.model, self.session.optimizer
        return {"model": WholeModel(model), "optimizer": NamedOptimizer(optimizer, model)}
