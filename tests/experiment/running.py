"""Experiments on ranks that are threads, and the functions of torchmn.experiment that its tests call.

Tests import these functions from here, so that they do not depend on the files of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torchmn
from torchmn import create_multi_node_checkpointer
from torchmn.experiment import Experiment, parse_set
from torchmn.experiment.dry_run import DryRun, dry_run
from torchmn.experiment.file import registry
from torchmn.experiment.file.writing import as_yaml
from torchmn.experiment.report.page import TEMPLATES
from torchmn.experiment.run import parallel
from torchmn.experiment.run.agreement import dataset_fingerprint, on_every_rank
from torchmn.experiment.run.evaluation import evaluate, predict
from torchmn.experiment.run.grids import GridError, description, grid_for
from torchmn.experiment.run.model import build_model, load_data
from torchmn.experiment.run.run_directory import RunDirectory, choose_directory
from torchmn.experiment.run.session import open_session
from torchmn.experiment.run.state import NamedOptimizer, global_gradients
from torchmn.experiment.run.trainer import Progress, Trainer
from torchmn.experiment.train import Request, open_trained
from torchmn.experiment.train import train as train_from_file
from torchmn.experiment.verification import ModeResult, StepResults, configurations, deviations, verify
from torchmn.experiment.vocabulary.json_schema import json_schema
from torchmn.experiment.vocabulary.load import check, check_round_trip, parse, plain, read
from torchmn.experiment.vocabulary.metrics import by_label
from torchmn.experiment.vocabulary.optimizers import OptimizerRules, layer_optimizer_options, parameter_groups
from torchmn.experiment.vocabulary.schedules import Schedule
from torchmn.parallel import GlobalModelState
from torchmn.training import Logger

__all__ = [
    "TEMPLATES",
    "DryRun",
    "GridError",
    "ModeResult",
    "NamedOptimizer",
    "OptimizerRules",
    "Ran",
    "Request",
    "RunDirectory",
    "Schedule",
    "StepResults",
    "as_yaml",
    "build_model",
    "by_label",
    "check",
    "check_round_trip",
    "choose_directory",
    "configurations",
    "dataset_fingerprint",
    "description",
    "deviations",
    "dry_run",
    "evaluate",
    "experiment",
    "global_gradients",
    "grid_for",
    "json_schema",
    "layer_optimizer_options",
    "load_data",
    "on_every_rank",
    "open_session",
    "open_trained",
    "parallel",
    "parameter_groups",
    "parse",
    "plain",
    "predict",
    "read",
    "registry",
    "train",
    "train_from_file",
    "verify",
]


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
