"""Names that users register as functions: data sets, costs, metrics, optimizers, layers and others."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

from tests.experiment.running import experiment, registry, train
from torchmn.errors import ArgumentError, ExperimentError

FILE = """
dataset: {name: own_stripes, count: 26, validation: 20%}
model:
  layers:
    - conv: {maps: 3, kernel: 3, activation: own_square, init: own_ramp}
    - own_scaled: {factor: 1.5}
    - linear: {units: 3}
  cost: {name: own_margin, margin: 0.5, scale: 2.0}
optimizer: {name: own_sgd, lr: 0.05, schedule: {exponential: 0.5}}
epochs: 2
batch_size: 6
dtype: float64
metrics: [own_confidence, accuracy]
"""


class Times(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def own_stripes(count: int = 30):
    numbers = np.random.default_rng(0)
    images = torch.from_numpy(numbers.normal(size=(count, 1, 7, 6)))
    labels = torch.from_numpy(numbers.integers(0, 3, count))
    return {"train": (images[5:], labels[5:]), "test": (images[:5], labels[:5])}


def own_margin(activation, *, margin: float = 1.0):
    def losses(outputs, targets):
        right = outputs.gather(1, targets[:, None])
        return (outputs - right + margin).relu().sum(dim=1)

    return losses


def own_confidence():
    return lambda outputs, targets: outputs.softmax(dim=1).amax(dim=1)


def own_sgd(parameters, *, lr: float, weight_decay: float = 0.0):
    return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay)


def own_ramp(*, top: float = 0.3):
    return lambda weight: weight.copy_(torch.linspace(-top, top, weight.numel()).view_as(weight))


WORDS = {
    "dataset": own_stripes,
    "cost": own_margin,
    "metric": own_confidence,
    "optimizer": own_sgd,
    "initializer": own_ramp,
    "activation": lambda: Square(),
}


@pytest.fixture
def own_words():
    for noun, word in WORDS.items():
        getattr(registry, f"register_{noun}")(word.__name__ if word.__name__ != "<lambda>" else "own_square")(word)

    @registry.register_layer("own_scaled")
    def own_scaled(shape, factor: float = 1.0):
        assert shape == (3, 5, 4)
        return Times(factor)

    yield
    for kind in registry.KINDS:
        for name in [name for name in kind.entries if name.startswith("own_")]:
            del kind.entries[name]


@pytest.mark.parametrize(("ranks", "mode"), [(2, "datapar"), (3, "datapar"), (2, "modelpar"), (4, "halopar")])
def test_registered_names_give_the_same_numbers_on_any_number_of_ranks(ranks, mode, own_words):
    alone, together = train(experiment(FILE)), train(experiment(FILE), ranks, mode)
    np.testing.assert_allclose(together.losses, alone.losses, rtol=1e-10)
    for ours, theirs in zip(together.history, alone.history, strict=True):
        same = {name: value for name, value in theirs.items() if "own_confidence" in name or "loss" in name}
        assert len(same) >= 3
        assert {name: ours[name] for name in same} == pytest.approx(same, rel=1e-10)


GIVEN = {
    "no mapping": (lambda: [1, 2], "expected {'train': (inputs, targets), 'test': ...}, got list"),
    "no training": (lambda: {"test": 1}, "got the keys 'test'"),
    "a split": (lambda: {"train": (np.ones((2, 3)), [0, 1]), "dev": 1}, "got 'dev'"),
    "no pair": (
        lambda: {"train": np.ones((2, 3))},
        "expected a pair (inputs, targets) of arrays or tensors, got ndarray",
    ),
    "lengths": (lambda: {"train": (np.ones((2, 3)), [0, 1, 1])}, "as many targets as inputs, got 3 and 2"),
    "words": (lambda: {"train": (np.ones((2, 3)), ["a", "b"])}, "labels 0, 1, ... or floats, got <U1"),
    "negative": (lambda: {"train": (np.ones((2, 3)), [-1, 1])}, "labels 0, 1, ... or floats, got int64, the first"),
    "flat": (lambda: {"train": (np.ones(2), [0, 1])}, "numbers of shape (samples, ...), got float64 (2,)"),
}


@pytest.mark.parametrize(("function", "message"), GIVEN.values(), ids=GIVEN)
def test_the_result_of_a_registered_data_set_is_checked(function, message, own_words):
    registry.register_dataset("own_broken")(function)
    with pytest.raises(ExperimentError, match=re.escape(message)):
        train(experiment(FILE.replace("{name: own_stripes, count: 26, validation: 20%}", "own_broken")))


@pytest.mark.parametrize("noun", ["cost", "metric"])
def test_a_cost_or_metric_that_returns_a_mean_raises_an_error(noun, own_words):
    getattr(registry, f"register_{noun}")("own_mean")(lambda: lambda outputs, targets: outputs.mean())
    text = FILE.replace(
        "own_confidence" if noun == "metric" else "{name: own_margin, margin: 0.5, scale: 2.0}", "own_mean"
    )
    with pytest.raises(
        ExperimentError, match=r"own_mean: expected one number per sample, of shape \([56],\), got \(\)"
    ):
        train(experiment(text))


def test_a_registered_optimizer_must_take_a_learning_rate():
    with pytest.raises(ArgumentError, match="register_optimizer: expected own_nothing to take lr="):

        @registry.register_optimizer("own_nothing")
        def own_nothing(parameters):
            return torch.optim.SGD(parameters)


def _given(pair):
    return lambda: {"train": pair}


@pytest.mark.parametrize("from_file", [False, True], ids=["own", "npz"])
def test_the_byte_order_of_arrays_does_not_matter(from_file, own_words, tmp_path):
    inputs, targets = np.random.default_rng(0).normal(size=(6, 4)), np.eye(3)[[0, 1, 2, 2, 1, 0]]
    text = (
        "model: {layers: [linear: 3], cost: mean_squared}\noptimizer: adam\nepochs: 1\nbatch_size: 4\ndtype: float64\n"
    )
    ran = []
    for order in ("<", ">"):
        arrays = inputs.astype(f"{order}f8"), targets.astype(f"{order}f4")
        path = tmp_path / f"{'little' if order == '<' else 'big'}.npz"
        np.savez(path, x_train=arrays[0], y_train=arrays[1])
        registry.datasets.entries.pop("own_ordered", None)
        registry.register_dataset("own_ordered")(_given(arrays))
        dataset = f"{{name: npz, path: {path}}}" if from_file else "own_ordered"
        ran.append(train(experiment(f"dataset: {dataset}\n{text}")))
    assert ran[0].losses == ran[1].losses
