"""Experiments on ranks that are threads, and what came of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torchmn
from torchmn import create_multi_node_checkpointer
from torchmn.experiment import Experiment, parse_set
from torchmn.experiment.run.session import open_session
from torchmn.experiment.run.trainer import Progress, Trainer
from torchmn.experiment.vocabulary.load import read
from torchmn.parallel.global_state import GlobalModelState
from torchmn.training import Logger


@dataclass(frozen=True)
class Ran:
    """The loss of each step, the rows of each epoch, and the global weights at the end."""

    losses: list[float]
    history: list[dict[str, float]]
    weights: dict[str, Any]
    finished: bool


class _Losses(Logger):
    """Keeps what a training would show."""

    def __init__(self, comm: Any):
        super().__init__(comm)
        self.losses: list[float] = []

    def step(self, **values: Any) -> None:
        self.losses.append(float(values.get("loss", values.get("cost", 0.0))))

    def epoch(self, **values: Any) -> None:
        pass

    def print(self, text: str = "") -> None:
        pass


def experiment(text: str, *changes: str) -> Experiment:
    """The experiment of a text, with `--set` changes."""
    return read("x.yaml", text, [parse_set(change) for change in changes])


def train(
    chosen: Experiment,
    ranks: int = 1,
    mode: str | None = None,
    *,
    data: str | None = None,
    checkpoints: str | None = None,
    stop_after: int | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Ran:
    """Train on ranks that are threads; `stop_after` so many steps stops as Ctrl-C would, on the last rank alone."""
    update = {"parallel": chosen.parallel_section().model_copy(update={"mode": mode})} if mode else {}
    chosen = chosen.model_copy(update=update)

    def on_each(comm: torchmn.Communicator) -> Ran:
        session = open_session(chosen, comm, data)
        log = _Losses(comm)
        checkpointer = create_multi_node_checkpointer("training", comm, checkpoints) if checkpoints else None

        def stop() -> bool:
            return stop_after is not None and comm.rank == comm.size - 1 and len(log.losses) + 1 >= stop_after

        trainer = Trainer(session, log, checkpointer, stop)
        if resume:
            assert trainer.resume()
            if on_progress is not None and comm.rank == 0:
                on_progress(trainer.progress)
        finished = trainer.run()
        weights = GlobalModelState(session.placed.model).state_dict()
        return Ran(log.losses, trainer.progress.history, weights, finished)

    return torchmn.run_threads(on_each, ranks)[0]
