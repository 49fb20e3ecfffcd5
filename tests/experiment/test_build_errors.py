"""Errors while a model, cost or data set is built name file, line, column and the layer, on all ranks."""

from __future__ import annotations

import re

import numpy as np
import pytest
from torch import nn

import torchmn
from tests.experiment.files import BASE, swap
from tests.experiment.running import build_model, experiment, load_data, open_session, read, registry
from tests.experiment.test_round_trip import options_of
from torchmn.errors import ExperimentError
from torchmn.experiment import Experiment

LAYER = "- max_pool: {kernel: 2}"


def test_a_pool_of_vectors_raises_an_error_with_its_place():
    chosen = read("x.yaml", swap(LAYER, f"- linear: 8\n    {LAYER}"))
    data = load_data(chosen, None)["train"]
    with pytest.raises(ExperimentError) as error:
        build_model(chosen, data)
    expected = "max_pool1: max_pool needs images of shape (maps, height, width), got samples of shape 8"
    assert str(error.value) == f"x.yaml:6:17: {expected}"


SHAPES = [(7,), (3, 6), (2, 6, 5), (2, 4, 5, 6), (2, 3, 3, 3, 3), (1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_layer_is_built_or_raises_an_error_with_its_place_for_samples_of_any_shape(shape):
    data = f"dataset={{name: random, shape: {list(shape)}, train: 60, test: 0}}"
    for name, cls in registry.layers.entries.items():
        layer = f"{{{name}: {options_of(cls)}}}".replace("'", '"')
        chosen = experiment(BASE, data, f"model.layers=[{layer}, flatten, linear: 10]")
        message = error_of(chosen)
        inner = "conv" if name in ("list", "sequence", "branch") else cls.kind
        assert message is None or re.match(rf"--set model\.layers=.*: ({cls.kind}|{inner})1: ", message), message
        assert "raised at" not in (message or ""), message  # only for the code of users


def error_of(chosen: Experiment) -> str | None:
    try:
        build_model(chosen, load_data(chosen, None)["train"])
    except ExperimentError as error:
        return str(error)
    return None


ERRORS = {
    "KeyError(0)": "KeyError: 0 (raised at {file}:{line}{shape})",
    "AssertionError()": "AssertionError (raised at {file}:{line}{shape})",
    "SystemExit('bye')": "SystemExit: bye (raised at {file}:{line}{shape})",
    "ZeroDivisionError('by zero')": "ZeroDivisionError: by zero (raised at {file}:{line}{shape})",
    "ValueError('too small')": "too small",
}
FILES = {
    "layer": (swap(LAYER, "- own_failing"), "x.yaml:5:7: own_failing1: "),
    "activation": (swap("relu", "own_failing"), "x.yaml:4:13: conv1: "),
    "initializer": (swap("activation: relu", "init: own_failing"), "x.yaml:4:13: conv1: "),
    "cost": (swap("cost: cross_entropy", "cost: own_failing"), "x.yaml:7:9: own_failing: "),
    "metric": (BASE + "metrics: [own_failing]\n", "x.yaml:11:11: own_failing: "),
    "optimizer": (swap("{name: sgd, lr: 0.1}", "{name: own_failing, lr: 0.1}"), "x.yaml:8:12: own_failing: "),
    "dataset": (swap("{name: mnist, sample: 10%}", "own_failing"), "x.yaml:1:10: own_failing: "),
}


@pytest.fixture
def register():
    """Returns a function that registers `own_failing` as a layer, cost, ..."""
    yield lambda noun, function: getattr(registry, f"register_{noun}")("own_failing")(function)
    for kind in registry.KINDS:
        kind.entries.pop("own_failing", None)


def messages_of(text: str, ranks: int = 2) -> list[str]:
    """Returns the error message of each rank when the experiment is opened."""

    def body(comm: torchmn.Communicator) -> str:
        with pytest.raises(ExperimentError) as error:
            open_session(read("x.yaml", text), comm)
        return str(error.value)

    return torchmn.run_threads(body, ranks)


@pytest.mark.parametrize("raised", ERRORS)
@pytest.mark.parametrize("noun", FILES)
def test_an_error_of_registered_code_is_reported_with_its_place_on_all_ranks(noun, raised, register, tmp_path):
    source = tmp_path / "own.py"
    takes_rate = "*args, lr: float" if noun == "optimizer" else "*args"
    source.write_text(f"def own_failing({takes_rate}):\n    raise {raised}\n")
    space: dict = {}
    exec(compile(source.read_text(), str(source), "exec"), space)
    register(noun, space["own_failing"])
    text, place = FILES[noun]
    shape = ", its input has shape 1 x 28 x 28" if noun in ("activation", "initializer") else ""
    shape = ", its input has shape 4 x 24 x 24" if noun == "layer" else shape
    expected = place + ERRORS[raised].format(file=source, line=2, shape=shape)
    assert messages_of(text) == [expected] * 2


def test_a_layer_that_fails_on_one_rank_is_reported_on_all_ranks(register):
    ranks = iter(range(100))

    def own_failing(shape):
        if next(ranks) == 1:  # of the two that build it, one after the other
            raise KeyError("only here")
        return nn.Identity()

    register("layer", own_failing)
    messages = messages_of(FILES["layer"][0])
    assert messages[0] == messages[1]
    assert re.match(r"rank [01] of 2: model: x\.yaml:5:7: own_failing1: KeyError: 'only here'", messages[0])


def test_models_whose_shapes_differ_between_ranks_raise_an_error(register):
    sizes = iter((3, 4))
    register("layer", lambda shape: nn.Conv2d(shape[0], next(sizes), 1))
    messages = messages_of(FILES["layer"][0])
    assert messages[0] == messages[1]
    assert "all ranks must have the same model" in messages[0] and "own_failing1.weight" in messages[0]


def test_an_error_in_float64_names_the_model(register):
    class Single(nn.Module):
        def forward(self, x):
            return x @ nn.Parameter(np_ones(x.shape[-1]))

    def np_ones(n):
        import torch

        return torch.from_numpy(np.ones((n, n), dtype=np.float32))

    register("layer", lambda shape: Single())
    messages = messages_of(FILES["layer"][0] + "dtype: float64\n")
    assert messages[0].startswith("x.yaml:6:15: the model in float64: ") and messages[0] == messages[1]
