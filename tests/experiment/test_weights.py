"""`model: {weights: path}`: training begins with the weights of a file, with the numbers of one rank in every mode."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

import torchmn
from tests.experiment.files import BASE
from tests.experiment.running import evaluate, experiment, json_schema, open_session, train
from torchmn.errors import ExperimentError
from torchmn.experiment import train as training

SMALL = BASE.replace("{name: mnist, sample: 10%}", "{name: random, shape: [1, 8, 8], train: 100, test: 31}")
TEXT = SMALL + "dtype: float64\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The weights after an epoch, and a file with them."""
    weights = train(experiment(TEXT)).weights
    path = tmp_path_factory.mktemp("weights") / "trained.safetensors"
    save_file({name: x.contiguous() for name, x in weights.items()}, path)
    return weights, path


@pytest.fixture(scope="module")
def continued(trained):
    return train(experiment(TEXT, f"model.weights={trained[1]}"))


def test_training_begins_with_the_weights_of_the_file(trained):
    weights, path = trained
    session = torchmn.run_threads(lambda comm: open_session(experiment(TEXT, f"model.weights={path}"), comm), 1)[0]
    state = session.placed.model.state_dict()
    assert all(torch.equal(state[name], x) for name, x in weights.items())


@pytest.mark.parametrize(("mode", "ranks"), [("datapar", 2), ("modelpar", 3), ("halopar", 3), ("halodatapar", 4)])
def test_every_mode_continues_with_the_numbers_of_one_rank(mode, ranks, trained, continued):
    got = train(experiment(TEXT, f"model.weights={trained[1]}"), ranks, mode)
    assert got.losses == pytest.approx(continued.losses, rel=1e-9)
    for name, x in continued.weights.items():
        torch.testing.assert_close(got.weights[name], x, rtol=1e-8, atol=1e-10)


def test_weights_of_another_model_are_an_error_of_the_experiment(trained):
    changed = experiment(TEXT, f"model.weights={trained[1]}", "model.layers=[linear: 10]")

    def work(comm):
        with pytest.raises(ExperimentError, match=r"model: weights: load_weights: .*does not fit"):
            open_session(changed, comm)

    torchmn.run_threads(work, 2)


def test_the_schema_has_the_key():
    assert "weights" in json_schema()["$defs"]["ModelSection"]["properties"]


def test_a_trained_run_is_evaluated_and_resumed_without_the_file(trained, tmp_path):
    path, out = tmp_path / "first.safetensors", str(tmp_path / "run")
    path.write_bytes(trained[1].read_bytes())
    chosen = experiment(TEXT, f"model.weights={path}")
    console = Console(file=io.StringIO())

    def run(comm, resume=False):
        more = chosen.model_copy(update={"epochs": 2}) if resume else chosen
        return training.train(more, comm, training.Request("x.yaml", out=out, resume=resume, console=console))

    first = torchmn.run_threads(run, 2)[0].history
    path.unlink()
    session, step = torchmn.run_threads(lambda comm: training.open_trained(chosen, comm, out, "test", None), 1)[0]
    assert step == session.batches.steps
    assert evaluate(session, "test")["loss"] == pytest.approx(first[-1]["test loss"], rel=1e-9)
    assert len(torchmn.run_threads(lambda comm: run(comm, resume=True), 2)[0].history) == 2
