"""Saved experiments are read as equal ones: every registered name, every starter file, and users' options."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BeforeValidator, Field
from rich.console import Console
from torch import nn

from tests.cli.commands import STARTERS, starters
from tests.experiment.files import BASE, swap
from tests.experiment.running import Request, as_yaml, check_round_trip, experiment, plain, read, registry
from tests.experiment.running import train_from_file as train
from torchmn import run_threads
from torchmn.errors import ArgumentError, ExperimentError
from torchmn.experiment import Experiment, dump, load

# Values of options that are required, or that have several forms.
VALUES = {
    "kernel": 3, "maps": 4, "units": 5, "shape": [1, 28, 28], "last": 2, "factor": [2, 3], "split": 2, "lr": 0.1,
    "layers": [{"conv": {"maps": 2, "kernel": [3, 1], "padding": "same"}}, "relu"], "name": "torch.nn.Flatten",
    "step_size": 2, "milestones": [1, 2], "gamma": 0.5, "T_max": 3, "T_0": 3, "base_lr": 0.01, "max_lr": 0.1,
    "torchmetrics": "classification.MulticlassAUROC",
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Returns whether all classes and values of two experiments are equal, independent of `plain`."""
    if type(one) is not type(other):
        return False
    if hasattr(type(one), "model_fields"):
        return all(same(getattr(one, name), getattr(other, name)) for name in type(one).model_fields)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return one == other


def check(chosen: Experiment) -> None:
    for text in (dump(chosen), as_yaml(plain(chosen))):
        assert same(read("again.yaml", text), chosen), text
    check_round_trip(chosen)


def options_of(cls: type[registry.Options]) -> dict[str, Any]:
    return {name: VALUES[name] for name, info in cls.model_fields.items() if info.is_required()}


def changes() -> Iterator[tuple[str, str]]:
    """Yields a change of a small file for each registered name."""
    for kind in registry.KINDS:
        for name, cls in kind.entries.items():
            options = options_of(cls)
            reference = {"name": name, **options}
            change = {
                "layer": f"model.layers.1={{{name}: {options}}}",
                "activation": f"model.layers.0.conv.activation={reference}",
                "initializer": f"model.layers.0.conv.init={reference}",
                "cost": f"model.cost=[{reference}, {{name: sum_squared, scale: 2.0, units: [0, 3], target: inputs}}]",
                "optimizer": f"optimizer={reference}",
                "schedule": f"optimizer.schedule={reference}",
                "metric": f"metrics={{train: [{reference}], test: [{reference}]}}",
                "dataset": f"dataset={reference}",
            }[kind.noun]
            yield f"{kind.noun} {name}", change.replace("'", '"')


CHANGES = dict(changes())


def test_every_registered_name_is_read_unchanged():
    assert len(CHANGES) > 80
    for change in CHANGES.values():
        check(experiment(BASE, change))


MORE = [
    "model.layers.0.conv.optimizer={lr: 0.5, momentum: {from: 0.5, to: 0.9, end: 3}, weight_decay: 0.1}",
    "optimizer={name: sgd, lr: 0.1, momentum: {from: 0.5, to: 0.9, start: 1, end: 3}, schedule: {step: [2, 4]}}",
    "model.layers.1={branch: {layers: [{list: [relu, {conv: {maps: 2, kernel: 1}}]}, identity], join: concat}}",
    "model.layers.1={module: {name: torch.nn.Flatten, arguments: {start_dim: 1, more: {a: [1, {b: null}], 3: .nan}}}}",
    "model.layers.1={dropout: {keep: 0.7}}",
    "parallel={mode: halopar, grid: {height: 2, width: 2}}",
    "metrics=",
    "metrics=[{name: accuracy, top: 2}, log_loss]",
    "metrics=[{torchmetrics: classification.MulticlassF1Score, average: macro, units: [0, 5]}]",
    "model.weights=trained.safetensors",
    "dataset={name: mnist, path: '~/1e3: {x}', sample: 10%, validation: 5%}",
]


@pytest.mark.parametrize("change", MORE)
def test_every_form_of_options_is_read_unchanged(change):
    chosen = experiment(BASE, change)
    again = read("again.yaml", dump(chosen))
    assert plain(again) == plain(chosen) or ".nan" in change
    check_round_trip(chosen)


MODELS = [
    "module: torch.nn.Flatten",
    "module: {name: torch.nn.Flatten, arguments: {end_dim: 3}}",
    "autoencoder: {maps: 2, kernels: [3, 2], classifier: {momentum: 0.5}}",
]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_without_layers_is_read_unchanged(model):
    layers = BASE[BASE.index("  layers:") : BASE.index("  cost:")]
    check(experiment(BASE.replace(layers, f"  {model}\n")))


@pytest.mark.parametrize("name", sorted(starters()))
def test_every_starter_file_is_read_unchanged(name):
    check(load(STARTERS / f"{name}.yaml"))


# Registered by users -----------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    SOFT = "soft"


@pytest.fixture
def own_words():
    @registry.register_layer("own_window")
    def own_window(shape, *, sides: tuple[int, int] = (3, 4), other: tuple[float, ...] | None = None, act=nn.ReLU):
        assert isinstance(sides, tuple) and act is nn.ReLU
        return nn.Identity()

    @registry.register_layer("own_grown")
    class Grown(registry.Layer):
        """An option whose value changes each time it is read."""

        width: Annotated[int, BeforeValidator(lambda value: value + 1)] = 3

    @registry.register_layer("own_kind")
    class OfKind(registry.Layer):
        """An option whose value is not plain."""

        of: Annotated[Any, BeforeValidator(lambda value: Kind(value))] = Field(Kind.SOFT)

    yield
    for name in [name for name in registry.layers.entries if name.startswith("own_")]:
        del registry.layers.entries[name]


@pytest.mark.parametrize("layer", ["own_window", "own_window: {sides: [1, 2], other: [0.5]}", "own_kind"])
def test_options_of_registered_layers_are_read_unchanged(layer, own_words):
    check(experiment(swap("- max_pool: {kernel: 2}", f"- {layer}")))


REFUSED = {
    "own_grown: {width: 3}": "model.layers.1.width changes from 4 to 5 when it is saved and read again",
    "own_kind: {of: soft}": "model.layers.1.own_kind.of is <Kind.SOFT: 'soft'>, a tests.",
}


@pytest.mark.parametrize(("layer", "message"), REFUSED.items(), ids=REFUSED)
def test_an_experiment_that_cannot_be_saved_raises_an_error_before_training(layer, message, own_words, tmp_path):
    chosen = experiment(swap("- max_pool: {kernel: 2}", f"- {layer}"))
    request = Request("x.yaml", out=str(tmp_path / "run"), console=Console(quiet=True))

    def body(comm):
        with pytest.raises(ExperimentError, match=re.escape(message)):
            train(chosen, comm, request)

    run_threads(body, 2)
    assert not (tmp_path / "run").exists()


def test_an_option_cannot_be_called_name():
    with pytest.raises(ArgumentError, match="expected own_named to have no option `name`"):
        registry.register_dataset("own_named")(lambda name="x": None)
