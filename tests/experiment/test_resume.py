"""A stopped run is resumed exactly: at any step, on any number of ranks, in any mode."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from tests.experiment.running import Ran, Request, RunDirectory, choose_directory, experiment, open_trained, train
from tests.experiment.running import train_from_file as run
from tests.experiment.test_same_numbers import EVERYTHING, alone
from torchmn import run_threads
from torchmn.errors import ExperimentError

CHANGES = ("optimizer.momentum=0.9", "optimizer.schedule=null")
AUTOENCODER = """
dataset: {name: toy_images, side: 12, train: 24, test: 8}
model:
  autoencoder: {maps: 2, kernels: [3, 2], pool: 2, classes: 4, pretraining: {epochs: 2, lr: 0.001},
                classifier: {momentum: {from: 0.9, to: 0.5, end: 2}}}
  cost: binary_cross_entropy
optimizer: {name: sgd, lr: 0.05}
epochs: 3
batch_size: 8
dtype: float64
"""


@pytest.mark.parametrize("stop_after", [2, 4])
@pytest.mark.parametrize(
    ("before", "after"),
    [((1, "datapar"), (1, "datapar")), ((2, "datapar"), (1, "datapar")), ((2, "modelpar"), (3, "datapar")),
     ((4, "halopar"), (2, "modelpar")), ((1, "datapar"), (4, "halodatapar"))],
)  # fmt: skip
def test_a_resumed_run_gives_the_numbers_of_an_uninterrupted_one(before, after, stop_after, tmp_path):
    chosen, whole = experiment(EVERYTHING, "dtype=float64", *CHANGES), alone(*CHANGES)
    first = train(chosen, *before, checkpoints=str(tmp_path), stop_after=stop_after)
    assert not first.finished and len(first.losses) == stop_after
    second = train(chosen, *after, checkpoints=str(tmp_path), resume=True)
    assert second.finished
    losses = first.losses + second.losses
    assert losses == pytest.approx(whole.losses, rel=1e-9)
    assert [row == pytest.approx(other, rel=1e-9) for row, other in zip(second.history, whole.history, strict=True)]
    for name, weight in whole.weights.items():
        torch.testing.assert_close(second.weights[name], weight, rtol=1e-9, atol=1e-9, msg=name)


def test_a_finished_run_can_be_continued_for_more_epochs(tmp_path):
    longer = experiment(EVERYTHING, "dtype=float64", *CHANGES, "epochs=3")
    train(experiment(EVERYTHING, "dtype=float64", *CHANGES), checkpoints=str(tmp_path))
    more = train(longer, 2, "datapar", checkpoints=str(tmp_path), resume=True)
    assert more.losses == pytest.approx(train(longer).losses[-len(more.losses) :], rel=1e-9)
    assert len(more.history) == 3


BELIEF = """
dataset: {name: toy_images, side: 8, train: 22, test: 8}
model:
  layers:
    - rbm: {units: 9, pretraining: {epochs: 2, lr: 0.3}}
    - rbm: {units: 6, pretraining: {epochs: 1}}
    - linear: 4
  cost: cross_entropy
optimizer: {name: sgd, lr: 0.5, momentum: 0.5}
epochs: 2
batch_size: 8
dtype: float64
"""
# Pretraining of 2 stacks, 2 epochs and 3 batches; of 2 machines, 2 and 1 epochs, 3 batches.
PRETRAINED = [
    *((AUTOENCODER, 12, n, (2, "halopar"), (4, "halodatapar")) for n in (1, 3, 8, 12, 16)),
    *((BELIEF, 9, n, (3, "datapar"), (2, "datapar")) for n in (2, 8, 11)),
]


@cache
def uninterrupted(text: str) -> Ran:
    return train(experiment(text))


@pytest.mark.parametrize(("text", "pretraining", "stop_after", "before", "after"), PRETRAINED)
def test_stopped_pretraining_is_resumed_exactly(text, pretraining, stop_after, before, after, tmp_path):
    chosen, whole = experiment(text), uninterrupted(text)
    assert len(whole.losses) == pretraining + 3 * chosen.epochs
    first = train(chosen, *before, checkpoints=str(tmp_path), stop_after=stop_after)
    assert not first.finished and len(first.losses) == stop_after
    second = train(chosen, *after, checkpoints=str(tmp_path), resume=True)
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-9)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(second.weights[name], weight, rtol=1e-9, atol=1e-9, msg=name)


def test_a_run_cannot_be_resumed_with_another_experiment(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.begin(experiment(EVERYTHING))
    directory.begin(experiment(EVERYTHING))  # of which nothing is there yet
    (directory.checkpoints / "training.step-0000000001.save-000001").mkdir(parents=True)
    with pytest.raises(ExperimentError, match="already contains a run"):
        directory.begin(experiment(EVERYTHING))
    directory.check_resumable(experiment(EVERYTHING, "epochs=7", "parallel.mode=halopar"))
    with pytest.raises(ExperimentError, match="was started with another batch_size: 10, now 12"):
        directory.check_resumable(experiment(EVERYTHING, "batch_size=12"))
    with pytest.raises(ExperimentError, match="there is no run in"):
        RunDirectory(tmp_path / "other").check_resumable(experiment(EVERYTHING))


DIGITS = """
dataset: {name: mnist, sample: 1%}
model:
  layers: [{linear: {units: 9, activation: relu}}, {linear: 10}]
  cost: cross_entropy
optimizer: {name: sgd, lr: 0.5}
epochs: 1
batch_size: 8
"""


def test_weights_of_another_model_are_an_error(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.check_model(experiment(DIGITS))  # without a recorded experiment nothing is checked
    directory.begin(experiment(DIGITS))
    for change in ("model.cost=mean_squared", "dataset.sample=2%", "optimizer.lr=1.0"):
        directory.check_model(experiment(DIGITS, change))
    activation = r"another model\.layers\.0\.linear\.activation.*relu.*, now .*tanh.*run/experiment.yaml"
    with pytest.raises(ExperimentError, match=activation):  # the same shapes: it would load, and give other numbers
        directory.check_model(experiment(DIGITS, "model.layers.0.linear.activation=tanh"))
    with pytest.raises(ExperimentError, match=r"another model\.layers\.1\.linear\.units: 10, now 12"):
        directory.check_resumable(experiment(DIGITS, "model.layers.1.linear=12"))


def test_evaluation_with_weights_of_another_model_raises_on_every_rank(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.begin(experiment(DIGITS))
    directory.checkpoints.mkdir(exist_ok=True)
    requested = experiment(DIGITS, "model.layers.0.linear.activation=tanh")

    def body(comm):
        with pytest.raises(ExperimentError, match=r"another model\.layers\.0\.linear\.activation"):
            open_trained(requested, comm, str(directory.path), "test", None)

    run_threads(body, 2)


def test_the_log_is_truncated_when_pretraining_is_resumed(tmp_path):
    directory = RunDirectory(tmp_path)
    lines = [f'{{"step": 0, "pretraining step": {n}}}\n' for n in range(1, 5)]
    directory.log.write_text("".join(lines) + '{"step": 1}\n')
    directory.truncate_log(0, 3)
    assert directory.log.read_text() == "".join(lines[:3])
    directory.truncate_log(7, 3)
    assert directory.log.read_text() == "".join(lines[:3])


def test_the_log_is_truncated_when_a_run_is_resumed(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.log.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "epoch": 1}\n{"step": 3}\n{"ste')
    directory.truncate_log(2)
    assert directory.log.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2, "epoch": 1}\n'


def test_runs_without_a_name_get_the_next_free_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExperimentError, match="there is no run of digits"):
        choose_directory(None, "digits.yaml", resume=True)
    assert choose_directory(None, "x/digits.yaml", resume=False).path == tmp_path / "runs" / "digits"
    for name in ("digits", "digits-2", "digits-10", "digits-old", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert choose_directory(None, "digits.yaml", resume=False).path.name == "digits-11"
    assert choose_directory(None, "digits.yaml", resume=True).path.name == "digits-10"
    assert choose_directory("somewhere", "digits.yaml", resume=False).path == tmp_path / "somewhere"


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_at_once_do_not_write_into_the_same_directory(resume, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    request = Request("digits.yaml", out=str(directory.path), resume=resume, console=Console(quiet=True))

    def body(comm):
        with pytest.raises(ExperimentError, match="in use by another run"):
            run(experiment(DIGITS), comm, request)

    with directory.lock():
        run_threads(body, 2)
    assert list(directory.path.iterdir()) == []
    with directory.lock():  # and afterwards it is free again
        pass


def test_two_runs_without_a_name_at_once_get_two_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = RunDirectory(tmp_path / "runs" / "digits")
    chosen = iter([first])
    monkeypatch.setattr(
        "torchmn.experiment.train.choose_directory", lambda *args: next(chosen, None) or choose_directory(*args)
    )
    with first.lock():  # it has begun after the second has chosen the same name
        outcome = run_threads(
            lambda comm: run(experiment(DIGITS), comm, Request("digits.yaml", console=Console(quiet=True))), 1
        )
    assert outcome[0].directory.path.name == "digits-2" and list(first.path.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again_and_reports_it(resume, ranks, tmp_path):
    run_threads(lambda comm: run(experiment(DIGITS), comm, request(tmp_path / "whole")), ranks)
    (weights,) = (tmp_path / "whole" / "checkpoints").glob("*/common.safetensors")
    with safe_open(weights, "pt") as file:
        state = {name.removeprefix("model/"): file.get_tensor(name) for name in file.keys() if "model/" in name}  # noqa: SIM118
    save_file(state, tmp_path / "initial.safetensors")
    chosen = experiment(DIGITS, f"model.weights={tmp_path / 'initial.safetensors'}")
    whole = run_threads(lambda comm: run(chosen, comm, request(tmp_path / "again")), ranks)[0]

    killed = RunDirectory(tmp_path / "killed")
    killed.begin(chosen)
    killed.log.write_text('{"step": 1, "loss": 1.0}\n{"ste')
    (killed.checkpoints / ".training.step-0000000008.save-000001.partial").mkdir(parents=True)
    printed = io.StringIO()
    asked = replace(request(killed.path), resume=resume, console=Console(file=printed, width=200))
    outcome = run_threads(lambda comm: run(chosen, comm, asked), ranks)[0]
    assert outcome.finished and outcome.history == [pytest.approx(row) for row in whole.history]
    assert ("resumed at step 0: " if resume else "begun again: ") + "the run" in printed.getvalue()
    steps = [json.loads(line)["step"] for line in killed.log.read_text().splitlines()]
    assert steps == [*range(1, len(steps)), len(steps) - 1]  # once each, and the epoch


def request(out):
    return Request("digits.yaml", out=str(out), console=Console(quiet=True))


def test_a_checkpoint_that_cannot_be_read_is_not_overwritten_by_a_new_run(tmp_path):
    RunDirectory(tmp_path).begin(experiment(DIGITS))
    (tmp_path / "checkpoints" / "training.step-0000000008.save-000001").mkdir(parents=True)

    def body(comm):
        with pytest.raises(ExperimentError, match=r"no checkpoint in .* that all ranks can read"):
            run(experiment(DIGITS), comm, replace(request(tmp_path), resume=True))

    run_threads(body, 2)


@pytest.mark.parametrize("content", ["", "- 1\n", "dataset: [", "\x00"])
def test_a_damaged_experiment_file_of_a_run_is_an_experiment_error(content, tmp_path):
    (tmp_path / "experiment.yaml").write_text(content)
    with pytest.raises(ExperimentError, match=r"--resume: .*experiment\.yaml (cannot be read|contains no experiment)"):
        RunDirectory(tmp_path).check_resumable(experiment(DIGITS))


def test_a_resumed_run_has_no_report_until_its_end(tmp_path):
    request = Request("digits.yaml", out=str(tmp_path), console=Console(quiet=True))
    stopped = replace(request, resume=True, stop=lambda: True)
    outcome = [run_threads(lambda comm: run(experiment(DIGITS), comm, request), 1)[0].finished]
    assert (tmp_path / "report.html").exists()
    more = experiment(DIGITS, "epochs=2")
    outcome += [run_threads(lambda comm: run(more, comm, stopped), 1)[0].finished]
    assert outcome == [True, False] and not (tmp_path / "report.html").exists()


def test_a_run_cannot_be_resumed_with_fewer_epochs_than_it_has(tmp_path):
    request = Request("digits.yaml", out=str(tmp_path), console=Console(quiet=True))
    two = experiment(DIGITS, "epochs=2")
    run_threads(lambda comm: run(two, comm, request), 1)
    before = (tmp_path / "experiment.yaml").read_text(), (tmp_path / "report.html").read_text()

    def body(comm):
        with pytest.raises(ExperimentError, match=r"already has 2 epochs, and epochs is 1: use --epochs 2 or more"):
            run(experiment(DIGITS), comm, replace(request, resume=True))

    run_threads(body, 2)
    assert before == ((tmp_path / "experiment.yaml").read_text(), (tmp_path / "report.html").read_text())
