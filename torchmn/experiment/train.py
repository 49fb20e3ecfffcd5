"""A whole run of an experiment on the ranks of a communicator: training, log, checkpoints, report."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from torchmn.communicators.communicator import Communicator
from torchmn.errors import ExperimentError
from torchmn.experiment.report import write_report
from torchmn.experiment.run.agreement import on_rank_0
from torchmn.experiment.run.clock import RankTime
from torchmn.experiment.run.evaluation import predict
from torchmn.experiment.run.objective import chosen
from torchmn.experiment.run.pretraining import pretrainer_of
from torchmn.experiment.run.run_directory import RunDirectory, choose, run_of
from torchmn.experiment.run.session import Session, open_session
from torchmn.experiment.run.trainer import Progress, Trainer
from torchmn.experiment.vocabulary.layers.options import text
from torchmn.experiment.vocabulary.load import check_readable
from torchmn.experiment.vocabulary.schema import Experiment
from torchmn.parallel.global_state import WholeModel
from torchmn.training import Logger
from torchmn.training.checkpoint import MultiNodeCheckpointer, create_multi_node_checkpointer

CHECKPOINT = "training"


@dataclass(frozen=True)
class Request:
    """What a user asks of a run beside the experiment itself."""

    file: str
    data: str | None = None
    out: str | None = None
    resume: bool = False
    stop: Callable[[], bool] = lambda: False
    console: Console | None = None
    profile: bool = False
    go_on: str = ""
    """The command that goes on with this run, up to the directory of it."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `history` has a row of numbers for each epoch."""

    finished: bool
    directory: RunDirectory
    history: list[dict[str, float]]


def train(experiment: Experiment, comm: Communicator, request: Request) -> Outcome:
    """Train to the end, or to where the user stops it; every rank must call it."""
    check_readable(experiment)
    session = open_session(experiment, comm, request.data)
    absent = [split for split in experiment.predictions if split not in session.splits]
    if absent:
        raise ExperimentError(f"predictions: there are no {absent[0]} samples, only {', '.join(session.splits)} ones")
    with ExitStack() as held:
        directory = on_rank_0(comm, "output directory", lambda: _prepared(experiment, request, held))
        return _train_in(directory, session, request)


def _train_in(directory: RunDirectory, session: Session, request: Request) -> Outcome:
    """Train with a log and checkpoints in a directory that is ours alone."""
    experiment, comm = session.experiment, session.comm
    checkpointer = checkpoints(session, directory)
    trainer = Trainer(session, Logger(comm), checkpointer, request.stop)
    if request.resume and not trainer.resume():
        raise ExperimentError(f"--resume: no checkpoint in {directory.checkpoints} that all ranks can read")
    if trainer.progress.epoch > experiment.epochs:
        raise ExperimentError(
            f"--resume: the run in {directory.path} has {trainer.progress.epoch} epochs already, and epochs is "
            f"{experiment.epochs}: say --epochs {trainer.progress.epoch} or more"
        )
    if request.resume:
        on_rank_0(comm, "output directory", lambda: _record(directory, experiment, trainer.progress))
    steps = experiment.epochs * session.batches.steps - trainer.progress.step + _pretraining_steps(session, trainer)
    formats = {
        f"{split} {name}": ".2%" for split in session.splits for name, m in session.measures.items() if m.percent
    }
    formats |= {"seconds": ".1f", "samples/s": ".0f", "loss": ".5g"}
    formats |= {f"{split} loss": ".5g" for split in session.splits}
    with Logger(
        comm, max(steps, 0), json=directory.log, json_steps=1, append=True, formats=formats, console=request.console
    ) as log:
        trainer.log = log
        _introduce(session, directory, trainer, log)
        finished = trainer.run()
        if finished:
            _finish(session, directory, log)
            times = trainer.clock.of_all_ranks()
            trouble = write_report(session, directory, request.file, trainer.progress.history, times)
            if request.profile:
                _profile(times, log)
            log.print(f"\nreport  {directory.report}{trouble}")
        else:
            log.print(f"stopped after {_where(trainer)}; the checkpoint is in {directory.checkpoints}")
            command = request.go_on or f"torchmn train {shlex.quote(request.file)}"
            log.print(f"to go on: {command} --resume --out {shlex.quote(str(directory.path))}")
    return Outcome(finished, directory, trainer.progress.history)


def _record(directory: RunDirectory, experiment: Experiment, here: Progress) -> None:
    directory.record(experiment)
    directory.cut_log(here.step, here.pretraining.step)


def _pretraining_steps(session: Session, trainer: Trainer) -> int:
    """How many steps of the pretraining are still to come."""
    pretrainer = None if trainer.progress.pretrained else pretrainer_of(session)
    return 0 if pretrainer is None else pretrainer.steps - trainer.progress.pretraining.step


def _where(trainer: Trainer) -> str:
    here = trainer.progress
    return f"step {here.step}" if here.pretrained else f"step {here.pretraining.step} of the pretraining"


def checkpoints(session: Session, directory: RunDirectory) -> MultiNodeCheckpointer:
    """The checkpointer of a run."""
    return create_multi_node_checkpointer(CHECKPOINT, session.comm, directory.checkpoints, session.experiment.keep)


def _prepared(experiment: Experiment, request: Request, held: ExitStack) -> RunDirectory:
    """The directory of the run, which `held` keeps others out of."""
    directory = choose(request.out, request.file, request.resume)
    try:
        held.enter_context(directory.held())
    except ExperimentError:
        if request.out is not None or request.resume or not directory.path.is_dir():
            raise
        return _prepared(experiment, request, held)  # a run that began in this moment has chosen the same name
    if request.resume:
        directory.go_on(experiment)
    else:
        directory.begin(experiment)
    return directory


def _introduce(session: Session, directory: RunDirectory, trainer: Trainer, log: Logger) -> None:
    sizes = ", ".join(f"{len(arrays)} {split}" for split, arrays in session.splits.items())
    train = session.splits["train"]
    weights = sum(parameter.numel() for parameter in session.placed.model.parameters())
    log.print(f"data    {train.name.replace(' train', '')}: {sizes}, each {text(train.shape)}")
    log.print(f"model   {weights:,} weights{' on this rank' if session.placed.is_cut else ''}")
    log.print(f"ranks   {session.placed.description}")
    log.print(f"out     {directory.path}")
    here = trainer.progress
    if here.step:
        log.print(f"resumed after step {here.step}, in epoch {here.epoch + 1}")
    log.print()


def _finish(session: Session, directory: RunDirectory, log: Logger) -> None:
    """What comes after the last epoch: predictions, if asked for."""
    for split in dict.fromkeys(session.experiment.predictions):
        path = directory.path / f"predictions-{split}.npz"
        write_predictions(session, split, str(path))
        log.print(f"predictions: {path}")


def _profile(times: list[RankTime], log: Logger) -> None:
    log.print(f"\n{'rank':>6} {'compute':>10} {'exchange':>10} {'waiting':>10}   seconds in training steps")
    for rank, time in enumerate(times):
        log.print(f"{rank:>6} {time.compute:>10.2f} {time.exchange:>10.2f} {time.waiting:>10.2f}")


def write_predictions(session: Session, split: str, path: str) -> None:
    """Write the model's outputs for a split, its best classes and the targets; every rank must call it."""
    outputs, targets = predict(session, split)
    if session.comm.rank == 0:
        classes = chosen(outputs, session.objective.class_units)
        predicted = np.where(np.isnan(classes).any(axis=1), -1, classes.argmax(axis=1))
        np.savez(path, outputs=outputs, predicted=predicted, targets=targets)


class NotUsed:
    """Stands for what a checkpoint holds and nobody asks for here: the optimizer's state, where nothing is trained."""

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None:
        pass


def open_trained(
    experiment: Experiment, comm: Communicator, checkpoint: str, split: str, data: str | None
) -> tuple[Session, int]:
    """The experiment with the newest weights of a run, and their step; every rank must call it."""
    session = open_session(experiment, comm, data)
    if split not in session.splits:
        raise ExperimentError(f"--split {split}: {experiment.the_dataset().kind} has only {', '.join(session.splits)}")
    directory = run_of(checkpoint)
    if not directory.checkpoints.is_dir():
        raise ExperimentError(f"--checkpoint {checkpoint}: there are no checkpoints of `torchmn train --out`")
    on_rank_0(comm, "output directory", lambda: directory.check_trained(experiment))
    model, optimizer = WholeModel(session.placed.model), NotUsed()
    step = checkpoints(session, directory).maybe_load(model=model, optimizer=optimizer)
    if step is None:
        raise ExperimentError(f"--checkpoint {checkpoint}: no checkpoint that all ranks can read")
    return session, step
