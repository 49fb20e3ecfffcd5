"""Experiment files of neon 0.x: conversion, keys without effect, errors."""

# ruff: noqa: E501  (a message is one line)

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tests.experiment.running import as_yaml, build_model, check, load_data, parse, read, train
from torchmn.errors import ExperimentError
from torchmn.experiment import load

FILES = Path(__file__).parent / "neon_files"
PUBLIC, BEFORE, GB = (FILES / f"{name}.yaml" for name in ("public-cnn", "halopar-cnn", "halopar-gb"))


def values(path: Path) -> dict:
    return parse(path.name, path.read_text()).document.values


def test_a_public_file_is_converted():
    ours = values(PUBLIC)
    uniform = {"name": "uniform", "low": -0.1, "high": 0.1}
    gaussian = {"bias": True, "init": {"name": "gaussian", "std": 0.05}, "bias_init": 0.0}
    assert ours["model"]["layers"] == [
        {"conv": {"maps": 6, "kernel": 5, "stride": 1, "bias": False, "init": uniform}},
        {"max_pool": {"kernel": 2, "stride": 2}},
        {"dropout": {"keep": 0.8}},
        {"linear": {"units": 30, **gaussian, "activation": "relu"}},
        {"linear": {"units": 10, **gaussian, "activation": "logistic", "optimizer": {"lr": 0.01}}},
    ]
    assert ours["optimizer"] == {
        "name": "sgd",
        "lr": 0.05,
        "momentum": 0.9,
        "schedule": {"every": 2, "ratio": 0.5, "shift": 1},
    }
    assert ours["metrics"] == {"train": ["log_loss"], "test": [{"name": "misclassified", "top": 2}, "log_loss"]}
    assert (ours["epochs"], ours["batch_size"], ours["dataset"]) == (2, 100, {"name": "mnist", "train_sample": "10%"})
    assert ours["predictions"] == ["test"]


def test_a_file_from_before_the_release_is_converted():
    ours = values(BEFORE)
    assert [next(iter(layer)) for layer in ours["model"]["layers"]] == ["conv", "max_pool", "linear", "linear"]
    assert ours["parallel"] == {"mode": "halopar"} and ours["seed"] == 3
    assert ours["model"]["cost"] == "cross_entropy"
    assert (ours["shuffle"], ours["drop_last"]) == (False, True)


def test_each_key_without_effect_is_a_note_with_its_position():
    notes = parse("old.yaml", BEFORE.read_text()).notes
    assert [note.split(" ")[:2] for note in notes] == [
        ["old.yaml:5:12:", "backend"],
        ["old.yaml:9:24:", "serialized_path"],
        ["old.yaml:16:17:", "step_print"],
        ["old.yaml:20:15:", "name"],
        ["old.yaml:20:55:", "pos"],
        ["old.yaml:8:32:", "repo_path"],
    ]
    assert notes[0].endswith("backend has no effect: PyTorch computes, on the device of each rank")
    assert notes[3].endswith("name has no effect: a label in neon's logs (and in 4 more places)")


@pytest.mark.parametrize("path", [PUBLIC, BEFORE, GB], ids=lambda path: path.stem)
def test_the_converted_file_is_the_same_experiment(path):
    text = as_yaml(values(path))
    assert yaml.safe_load(text) == values(path)
    assert load(path).model_dump() == read("new.yaml", text).model_dump()


def test_an_old_file_trains_with_the_same_numbers_on_four_ranks():
    chosen = check(parse("old.yaml", BEFORE.read_text()).document)
    chosen = chosen.model_copy(update={"dtype": "float64"})
    alone = train(chosen, 1, "datapar")
    assert alone.losses == pytest.approx(train(chosen, 4, "halopar").losses, rel=1e-9)
    assert len(alone.losses) == 6


def test_the_sparse_autoencoder_is_recognised():
    ours = values(GB)["model"]["autoencoder"]
    assert ours["kernels"] == [4, 3] and ours["maps"] == 2 and ours["classes"] == 10
    assert ours["pretraining"] == {"epochs": 2, "lr": 0.01} and ours["classifier_epochs"] == 1
    assert ours["classifier"] == {"momentum": {"from": 0.99, "to": 0.9, "start": 0, "end": 5}}
    assert load(GB).model.cost.kind == "binary_cross_entropy"


def edited(old: str, new: str) -> str:
    text = PUBLIC.read_text()
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited("layers.PoolingLayer", "layers.PolingLayer"), "old.yaml:37:7: the layer PolingLayer is not supported. Did you mean 'PoolingLayer'?"),
        (edited("models.MLP", "models.RBM"), "old.yaml:30:10: the model RBM is not supported"),
        (edited("datasets.MNIST", "datasets.MOBIDICK"), "old.yaml:3:12: the data set MOBIDICK is not supported. Did you mean 'MOBYDICK'?"),
        (edited("transforms.RectLin", "transforms.RecLin"), "the activation RecLin is not supported. Did you mean 'RectLin'?"),
        (edited("transforms.CrossEntropy", "transforms.XCovarianc"), "the cost XCovarianc is not supported. Did you mean 'XCovariance'?"),
        (edited("metrics.MisclassRate", "metrics.Missclass"), "the metric Missclass is not supported. Did you mean"),
        (edited("params.UniformValGen", "params.IdentityValGen"), "the initial weights IdentityValGen are not supported"),
        (edited("gradient_descent_momentum", "rprop"), "old.yaml:14:10: the learning rule 'rprop' is not supported"),
        (edited("type: constant", "type: heavy"), "the momentum 'heavy' is not supported. Valid: constant"),
        (edited("type: step", "type: power"), "the schedule 'power' is not supported, only `step` is"),
        (edited("learning_rate: 0.05", "learning_rte: 0.05"), "lr_params has no key 'learning_rte'"),
        (edited("learning_rate: 0.01,", ""), "gradient_descent_momentum needs the key 'learning_rate'"),
        (edited("bias_init: 0.0", "bias_init: none"), "old.yaml:13:79: expected bias_init to be a number, got 'none'"),
        (edited("bias_init: 0.0", "bias_init: !hyperopt b FLOAT 0 1"), "b FLOAT 0 1: hyperparameter search is not supported"),
        (edited("op: 'max'", "op: [max]"), "old.yaml:37:48: expected op to be a string, got \"['max']\""),
        (edited("['test']", "3"), "old.yaml:11:16: expected predictions to be a list of splits, got '3'"),
        (edited("nofm: 6", "nofmaps: 6"), "ConvLayer has no key 'nofmaps'. Did you mean 'nofm'?"),
        (edited("nofm: 6", "nofm: six"), "old.yaml:36:93: expected conv's maps to be an integer, got 'six'"),
        (edited("num_epochs: 2,", ""), "MLP needs the key 'num_epochs'"),
        (edited("experiments.FitPredictErrorExperiment", "experiments.GradientChecker"), "the experiment GradientChecker is"),
        (edited("keep: 0.8", "keep: !tune k FLOAT 0 1"), "!tune is not supported here"),
        (edited("nout: 10", "nout: 5"), "the outputs have shape 5"),
    ],
)  # fmt: skip
def test_unsupported_values_are_errors_with_file_and_line(text, message):
    def build() -> None:
        chosen = read("old.yaml", text)
        build_model(chosen, load_data(chosen, None)["train"])

    with pytest.raises(ExperimentError) as error:
        build()
    assert message in str(error.value) and str(error.value).startswith("old.yaml:")
    assert "\n" not in str(error.value)


def test_nothing_that_a_file_names_is_imported(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExperimentError, match="the layer ConvLayerX"):
        read("old.yaml", edited("!obj:layers.ConvLayer ", "!obj:trap.ConvLayerX "))
    assert read("old.yaml", edited("!obj:layers.ConvLayer ", "!obj:trap.ConvLayer ")).epochs == 2


SOURCES = [path.read_text() for path in (PUBLIC, BEFORE, GB)]


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=some.data())
def test_any_neon_file_is_converted_or_an_experiment_error(drawn):
    text = drawn.draw(some.sampled_from(SOURCES))
    words = [
        "[]",
        "{}",
        "3",
        "x",
        "null",
        "-1",
        "True",
        "[1, 2]",
        "!obj:layers.FCLayer {}",
        "!obj:x.Y",
        "",
        ",",
        "}",
        "*bs",
    ]
    for _ in range(drawn.draw(some.integers(1, 2))):
        pieces = text.split(" ")
        place = drawn.draw(some.integers(0, len(pieces) - 1))
        pieces[place] = drawn.draw(some.sampled_from(words))
        text = " ".join(pieces)
    message = "old.yaml"
    try:
        read("old.yaml", text)
    except ExperimentError as error:
        message = str(error)
    assert all(line.startswith("old.yaml") for line in message.splitlines())
