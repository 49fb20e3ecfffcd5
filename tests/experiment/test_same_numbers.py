"""The promise: an experiment gives the same loss at every step, at any number of ranks, in every mode that fits."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.commands import STARTERS
from tests.experiment.running import Ran, experiment, train

MODES = {2: ["datapar", "modelpar", "halopar"], 4: ["hybrid", "halopar", "halodatapar"]}
LOCAL_MODES = {2: ["datapar"], 4: ["halopar", "halodatapar"]}  # slow ones
# Few samples, and steps enough for mistakes in gradients to show in the loss.
QUICK = ("dataset.sample=0.02", "batch_size=14", "epochs=1", "metrics=[misclassified, auc]")
QUICKER = {"mnist-gb": ("dataset.sample=0.005", "model.autoencoder.pretraining.epochs=1", "epochs=2"),
           "cifar10-gb": ("dataset.sample=0.015", "epochs=2"), "mnist-mlp-wide": ("dataset.sample=0.01",)}  # fmt: skip
CLASSICS = sorted(path.stem for path in STARTERS.glob("*.yaml"))

# All kinds of layers whose numbers could depend on the number of ranks.
EVERYTHING = """
dataset: {name: toy_images, side: 13, train: 23, test: 11}
model:
  layers:
    - conv: {maps: 4, kernel: 3, padding: same, batch_norm: true, activation: relu}
    - max_pool: {kernel: 3, stride: 2, padding: 1}
    - dropout: 0.3
    - branch:
        - conv: {maps: 3, kernel: [3, 1], padding: [1, 0], activation: tanh}
        - list:
            - conv: {maps: 2, kernel: 1, groups: 2}
            - leaky_relu
    - lcn: 3
    - response_norm: {size: 3}
    - local: {maps: 3, kernel: 2, unit_norm: true}
    - l2_pool: {kernel: 2, stride: 1}
    - cross_map_pool: 2
    - linear: {units: 11, activation: elu, batch_norm: true}
    - dropout: {keep: 0.6}
    - linear: {units: 4, optimizer: {lr: 0.05, momentum: 0.1}}
  cost: cross_entropy
optimizer: {name: sgd, lr: 0.1, weight_decay: 0.001, momentum: {from: 0.5, to: 0.9, end: 2}, schedule: {every: 1}}
epochs: 2
batch_size: 10
metrics: [accuracy, auc, log_loss, mse]
"""


@pytest.fixture(scope="session")
def cifar(tmp_path_factory) -> str:
    """A folder with files as CIFAR-10's, of few images."""
    folder = tmp_path_factory.mktemp("cifar")
    numbers = np.random.default_rng(0)
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        records = numbers.integers(0, 256, (260, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(260) % 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return str(folder)


@cache
def alone(*changes: str) -> Ran:
    """The run of EVERYTHING on one rank."""
    return train(experiment(EVERYTHING, "dtype=float64", *changes))


def apart(ours: Ran, theirs: Ran) -> float:
    assert len(ours.losses) == len(theirs.losses) > 0
    return max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(ours.losses, theirs.losses, strict=True))


def same_weights(ours: Ran, theirs: Ran, closeness: float) -> None:
    assert ours.weights.keys() == theirs.weights.keys()
    for name, expected in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], expected, rtol=closeness, atol=closeness, msg=name)


@pytest.mark.parametrize("name", CLASSICS)
def test_common_networks_have_the_same_loss_at_every_step(name, cifar):
    chosen = experiment((STARTERS / f"{name}.yaml").read_text(), *QUICK, *QUICKER.get(name, ()), "dtype=float64")
    data = cifar if "cifar" in name else None
    serial = train(chosen, data=data)
    for ranks, modes in (LOCAL_MODES if name.endswith("gb") else MODES).items():
        for mode in modes:
            ran = train(chosen, ranks, mode, data=data)
            assert apart(ran, serial) < 1e-9, (ranks, mode)
            same_weights(ran, serial, 1e-9)
            for mine, theirs in zip(ran.history, serial.history, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-9), (ranks, mode)


@pytest.mark.parametrize("mode", ["datapar", "modelpar", "halopar"])
def test_in_single_precision_losses_are_the_same_to_1e_5(mode):
    chosen = experiment((STARTERS / "mnist-cnn.yaml").read_text(), *QUICK)
    assert apart(train(chosen, 3, mode), train(chosen)) < 1e-5


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(2, "datapar"), (3, "datapar"), (12, "datapar"), (2, "modelpar"), (4, "hybrid"), (3, "halopar"), (4, "halopar"),
     (6, "halodatapar")],
)  # fmt: skip
def test_batch_norm_dropout_branches_and_local_layers_have_the_same_loss_at_every_step(ranks, mode):
    ran = train(experiment(EVERYTHING, "dtype=float64"), ranks, mode)
    assert apart(ran, alone()) < 1e-9
    same_weights(ran, alone(), 1e-9)
    for mine, theirs in zip(ran.history, alone().history, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


def test_ranks_without_a_sample_take_part():
    text = "\n".join(line for line in EVERYTHING.splitlines() if "dropout" not in line)
    chosen = experiment(text, "dtype=float64", "batch_size=5")
    serial, ran = train(chosen), train(chosen, 7, "datapar")
    assert apart(ran, serial) < 1e-9
    same_weights(ran, serial, 1e-9)


def test_another_seed_gives_other_numbers_and_the_same_seed_the_same():
    chosen, other = experiment(EVERYTHING), experiment(EVERYTHING, "seed=1")
    losses = train(chosen).losses
    assert train(chosen).losses == losses
    assert train(other).losses[0] != losses[0]


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_recurrent_layers_read_an_image_row_by_row(cell):
    layers = f"- reshape: [28, 28]\n    - {cell}: {{units: 6}}\n    - linear: 10"
    text = (STARTERS / "mnist-mlp.yaml").read_text()
    head, _, rest = text.partition("    - linear: {units: 100")
    tail = rest[rest.index("  cost:") :]
    chosen = experiment(head + "    " + layers + "\n" + tail, *QUICK, "dtype=float64")
    assert apart(train(chosen, 3, "datapar"), train(chosen)) < 1e-9


@pytest.mark.parametrize(("ranks", "mode"), [(3, "datapar"), (2, "modelpar"), (4, "halopar")])
def test_a_reconstruction_is_compared_with_whole_images(ranks, mode):
    layers = "[{linear: {units: 9, activation: logistic}}, {linear: {units: 64, activation: logistic}}]"
    text = (
        EVERYTHING[: EVERYTHING.index("model:")]
        + f"""
model: {{layers: {layers}, cost: cross_entropy, target: inputs}}
optimizer: {{name: adam, lr: 0.01}}
epochs: 2
batch_size: 10
metrics: [mse]
"""
    )
    chosen = experiment(text, "dtype=float64", "dataset.side=8")
    serial, ran = train(chosen), train(chosen, ranks, mode)
    assert apart(ran, serial) < 1e-9
    assert ran.history[-1] == pytest.approx(serial.history[-1], rel=1e-9)
    assert serial.history[-1]["test mse"] < 0.2


def test_the_starters_are_the_examples():
    examples = Path(__file__).parents[2] / "examples"
    assert len(CLASSICS) == 7
    for name in CLASSICS:
        assert (examples / f"{name}.yaml").read_text() == (STARTERS / f"{name}.yaml").read_text()
