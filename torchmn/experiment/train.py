"""train: runs an experiment on the ranks of a communicator, with log, checkpoints and report."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from torchmn.communicators.communicator import Communicator
from torchmn.errors import ExperimentError
from torchmn.experiment.report import RunRecord, write_report
from torchmn.experiment.run.agreement import on_rank_0
from torchmn.experiment.run.clock import RankTime
from torchmn.experiment.run.evaluation import predict
from torchmn.experiment.run.objective import select_units
from torchmn.experiment.run.pretraining import pretrainer_of
from torchmn.experiment.run.run_directory import RunDirectory, choose_directory, commit_of, run_directory_of
from torchmn.experiment.run.session import Session, load_initial_weights, open_session
from torchmn.experiment.run.trainer import GRADIENT_NORM, Progress, Trainer, learning_rates
from torchmn.experiment.vocabulary.layers.options import format_shape
from torchmn.experiment.vocabulary.load import check_round_trip
from torchmn.experiment.vocabulary.schema import Experiment
from torchmn.parallel.global_state import GlobalModelState
from torchmn.training import Logger
from torchmn.training.checkpoint import MultiNodeCheckpointer, create_multi_node_checkpointer

CHECKPOINT = "training"


@dataclass(frozen=True)
class Request:
    """The options of a run that are not part of the experiment.

    Attributes:
        file: path of the experiment file.
        data: directory of the data set.
        out: directory of the run; by default a new one under runs/.
        resume: whether to continue from the newest checkpoint; "auto": if `out` has a run.
        stop: called after each step on every rank; True on one of them stops training on all.
        console: where to print; by default standard output.
        profile: whether to print how each rank spent its time.
        resume_command: command line that continues this run, without --resume and --out.
    """

    file: str
    data: str | None = None
    out: str | None = None
    resume: bool | Literal["auto"] = False
    stop: Callable[[], bool] = lambda: False
    console: Console | None = None
    profile: bool = False
    resume_command: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `history` has the loss and metrics of each epoch."""

    finished: bool
    directory: RunDirectory
    history: list[dict[str, float]]


def train(experiment: Experiment, comm: Communicator, request: Request) -> Outcome:
    """Trains to the end, or until the user stops it. Every rank must call it.

    Raises:
        ExperimentError: on every rank, if the experiment, its data or the directory of the run is not usable.
    """
    if request.resume == "auto":
        resume = on_rank_0(comm, "output directory", lambda: choose_directory(request.out, request.file).has_begun)
        request = replace(request, resume=resume)
    session = checked_session(experiment, comm, request.data, loads_weights=not request.resume)
    with ExitStack() as locks:
        directory, note = on_rank_0(comm, "output directory", lambda: _prepare(experiment, request, locks))
        return _train_in(directory, session, request, note)


def checked_session(
    experiment: Experiment, comm: Communicator, data: str | None, loads_weights: bool = True
) -> Session:
    """Returns the session of an experiment that can be trained to its end. Every rank must call it.

    Args:
        experiment: the experiment.
        comm: the ranks.
        data: directory of the data set.
        loads_weights: whether to load the pretrained weights that the experiment names.

    Raises:
        ExperimentError: on every rank, if the experiment or its data are not usable.
    """
    check_round_trip(experiment)
    session = open_session(experiment, comm, data, loads_weights=loads_weights)
    absent = [split for split in experiment.predictions if split not in session.splits]
    if absent:
        raise ExperimentError(f"predictions: the data set has no {absent[0]} samples, only {', '.join(session.splits)}")
    return session


def _train_in(directory: RunDirectory, session: Session, request: Request, note: str) -> Outcome:
    """Trains with log and checkpoints in a directory that this run has locked, and prints `note` at the beginning."""
    experiment, comm = session.experiment, session.comm
    checkpointer = _checkpointer(session, directory)
    trainer = Trainer(session, Logger(comm), checkpointer, request.stop)
    if request.resume and not trainer.resume():
        if any(comm.allgather_obj(directory.has_checkpoints)):
            raise ExperimentError(
                f"--resume: no checkpoint in {directory.checkpoints} that all ranks can read. To begin again, use "
                "another --out."
            )
        load_initial_weights(session.placed.model, experiment, comm)
        note = "resumed at step 0: the run ended before its first checkpoint"
    if trainer.progress.epoch > experiment.epochs:
        raise ExperimentError(
            f"--resume: the run in {directory.path} already has {trainer.progress.epoch} epochs, and epochs is "
            f"{experiment.epochs}: use --epochs {trainer.progress.epoch} or more"
        )
    if request.resume:
        on_rank_0(comm, "output directory", lambda: _record(directory, experiment, trainer.progress))
    commit = commit_of(Path(request.file).parent)  # before training, during which the user may go on editing
    steps = experiment.epochs * session.batches.steps - trainer.progress.step + _pretraining_steps(session, trainer)
    with Logger(
        comm,
        max(steps, 0),
        json=directory.log,
        json_steps=1,
        append=True,
        formats=_number_formats(session),
        file_only=[*learning_rates(session), GRADIENT_NORM],
        console=request.console,
    ) as log:
        trainer.log = log
        _print_header(session, directory, trainer, log, note)
        finished = trainer.run()
        if finished:
            _write_predictions(session, directory, log)
            times, here = trainer.clock.of_all_ranks(), trainer.progress
            record = RunRecord(request.file, here.history, times, here.started, trainer.seconds(), commit)
            problem = write_report(session, directory, record)
            if request.profile:
                _print_times(times, log)
            log.print(f"\nreport  {directory.report}{problem}")
        else:
            log.print(f"stopped after {_last_step(trainer)}; the checkpoint is in {directory.checkpoints}")
            command = request.resume_command or f"torchmn train {shlex.quote(request.file)}"
            log.print(f"to continue: {command} --resume --out {shlex.quote(str(directory.path))}")
    return Outcome(finished, directory, trainer.progress.history)


def _number_formats(session: Session) -> dict[str, str]:
    formats = {"seconds": ".1f", "samples/s": ".0f", "loss": ".5g"}
    for split in session.splits:
        formats |= {f"{split} {name}": ".2%" for name, measure in session.measures.items() if measure.percent}
        formats[f"{split} loss"] = ".5g"
    return formats


def _record(directory: RunDirectory, experiment: Experiment, here: Progress) -> None:
    directory.record(experiment)
    directory.truncate_log(here.step, here.pretraining.step)


def _pretraining_steps(session: Session, trainer: Trainer) -> int:
    """Returns the number of remaining steps of pretraining."""
    pretrainer = None if trainer.progress.pretrained else pretrainer_of(session)
    return 0 if pretrainer is None else pretrainer.steps - trainer.progress.pretraining.step


def _last_step(trainer: Trainer) -> str:
    here = trainer.progress
    return f"step {here.step}" if here.pretrained else f"step {here.pretraining.step} of pretraining"


def _checkpointer(session: Session, directory: RunDirectory) -> MultiNodeCheckpointer:
    return create_multi_node_checkpointer(CHECKPOINT, session.comm, directory.checkpoints, session.experiment.keep)


def _prepare(experiment: Experiment, request: Request, locks: ExitStack) -> tuple[RunDirectory, str]:
    """Chooses the directory of the run and locks it until `locks` is closed; also returns what to print about it."""
    directory = choose_directory(request.out, request.file, bool(request.resume))
    try:
        locks.enter_context(directory.lock())
    except ExperimentError:
        if request.out is not None or request.resume or not directory.path.is_dir():
            raise
        return _prepare(experiment, request, locks)  # another run has just taken the same name: choose the next
    if request.resume:
        directory.check_resumable(experiment)
        return directory, ""
    note = "begun again: the run in this directory ended before its first checkpoint" if directory.has_log else ""
    directory.begin(experiment)
    return directory, note


def _print_header(session: Session, directory: RunDirectory, trainer: Trainer, log: Logger, note: str) -> None:
    sizes = ", ".join(f"{len(arrays)} {split}" for split, arrays in session.splits.items())
    train = session.splits["train"]
    weights = sum(parameter.numel() for parameter in session.placed.model.parameters())
    log.print(f"data    {train.name.replace(' train', '')}: {sizes}, each {format_shape(train.shape)}")
    log.print(f"model   {weights:,} weights{' on this rank' if session.placed.is_sharded else ''}")
    log.print(f"mode    {session.placed.description}")
    log.print(f"out     {directory.path}")
    here = trainer.progress
    if here.step:
        log.print(f"resumed after step {here.step}, in epoch {here.epoch + 1}")
    if note:
        log.print(note)
    log.print()


def _write_predictions(session: Session, directory: RunDirectory, log: Logger) -> None:
    """Writes the predictions that the experiment requests after the last epoch."""
    for split in dict.fromkeys(session.experiment.predictions):
        path = directory.path / f"predictions-{split}.npz"
        write_predictions(session, split, str(path))
        log.print(f"predictions: {path}")


def _print_times(times: list[RankTime], log: Logger) -> None:
    log.print(f"\n{'rank':>6} {'compute':>10} {'exchange':>10} {'waiting':>10}   seconds in training steps")
    for rank, time in enumerate(times):
        log.print(f"{rank:>6} {time.compute:>10.2f} {time.exchange:>10.2f} {time.waiting:>10.2f}")


def write_predictions(session: Session, split: str, path: str) -> None:
    """Writes outputs, predicted classes and targets of a split to an .npz file. Every rank must call it.

    Raises:
        ExperimentError: on every rank, if the file cannot be written.
    """
    outputs, targets = predict(session, split)

    def write() -> None:
        classes = select_units(outputs, session.objective.class_units)
        predicted = np.where(np.isnan(classes).any(axis=1), -1, classes.argmax(axis=1))
        try:
            np.savez(path, outputs=outputs, predicted=predicted, targets=targets)
        except OSError as error:
            raise ExperimentError(f"{path}: cannot be written ({error.strerror})") from error

    on_rank_0(session.comm, "predictions", write)


class IgnoredState:
    """Takes the place of an object in a checkpoint whose state is not needed: the optimizer, if nothing is trained."""

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None:
        pass


def open_trained(
    experiment: Experiment, comm: Communicator, checkpoint: str, split: str, data: str | None
) -> tuple[Session, int]:
    """Returns a session with the newest weights of a run, and their step. Every rank must call it.

    Args:
        experiment: the experiment that was trained.
        comm: the ranks to use.
        checkpoint: directory of the run, or of its checkpoints.
        split: a split that the data set must have.
        data: directory of the data set.

    Raises:
        ExperimentError: on every rank, if the run has no readable checkpoint, or is one of another model.
    """
    session = open_session(experiment, comm, data, loads_weights=False)
    if split not in session.splits:
        raise ExperimentError(f"--split {split}: {experiment.dataset.kind} has only {', '.join(session.splits)}")
    directory = run_directory_of(checkpoint)
    if not directory.checkpoints.is_dir():
        raise ExperimentError(f"--checkpoint {checkpoint}: there are no checkpoints of `torchmn train --out`")
    on_rank_0(comm, "output directory", lambda: directory.check_model(experiment))
    model, optimizer = GlobalModelState(session.placed.model), IgnoredState()
    step = _checkpointer(session, directory).maybe_load(model=model, optimizer=optimizer)
    if step is None:
        raise ExperimentError(f"--checkpoint {checkpoint}: no checkpoint that all ranks can read")
    return session, step
