"""Restricted Boltzmann machines: a step of contrastive divergence compared with NumPy, and training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.experiment.running import build_model, experiment, load_data, train
from torchmn import Communicator
from torchmn.communicators.transports.group import Settings
from torchmn.communicators.transports.solo import SoloTransport
from torchmn.errors import ExperimentError
from torchmn.experiment.run.grids import check
from torchmn.experiment.vocabulary.layers.boltzmann import Boltzmann, contrastive_divergence

TEXT = """
dataset: {name: toy_images, side: 8, train: 64, test: 16}
model:
  layers: [{rbm: {units: 12, pretraining: {epochs: 20, lr: 0.5}}}, {linear: 4}]
  cost: cross_entropy
optimizer: {name: sgd, lr: 0.1}
epochs: 1
batch_size: 16
"""


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_a_step_equals_its_definition():
    torch.manual_seed(0)
    machine = Boltzmann(5, 3, epochs=1, lr=0.2).double()
    with torch.no_grad():
        machine.hidden.weight.normal_()
        machine.hidden.bias.normal_()
        machine.visible_bias.normal_()
    w, b, a = (x.detach().numpy().copy() for x in (machine.hidden.weight, machine.hidden.bias, machine.visible_bias))
    v = np.random.default_rng(0).random((7, 5))
    cost = contrastive_divergence(machine, torch.from_numpy(v), 11, 7, Communicator(SoloTransport.of_world(Settings())))
    uniform = torch.rand(7, 3, generator=torch.Generator().manual_seed(11)).numpy()
    h = sigmoid(v @ w.T + b)
    v1 = sigmoid((h > uniform) @ w + a)
    h1 = sigmoid(v1 @ w.T + b)
    np.testing.assert_allclose(machine.hidden.weight.detach().numpy(), w + 0.2 / 7 * (h.T @ v - h1.T @ v1), rtol=1e-12)
    np.testing.assert_allclose(machine.hidden.bias.detach().numpy(), b + 0.2 / 7 * (h - h1).sum(0), rtol=1e-12)
    np.testing.assert_allclose(machine.visible_bias.numpy(), a + 0.2 / 7 * (v - v1).sum(0), rtol=1e-12)
    assert cost == pytest.approx(0.5 * ((v - v1) ** 2).sum() / 7)


def test_a_machine_learns_to_reconstruct():
    costs = train(experiment(TEXT)).losses[:80]
    assert sum(costs[-4:]) < 0.8 * sum(costs[:4])


def test_machines_are_not_sharded_and_must_be_direct_children_of_the_model():
    with pytest.raises(ExperimentError, match=r"modelpar is not possible: rbm layers cannot be sharded. Use --datapar"):
        check(experiment(TEXT, "parallel.mode=modelpar"), 2, (1, 8, 8))
    inside = experiment(TEXT.replace("{rbm: {units: 12, pretraining: {epochs: 20, lr: 0.5}}}", "{list: [rbm: 3]}"))
    with pytest.raises(ExperimentError, match=r"x.yaml:\d+:\d+: rbm must be in the model's list"):
        build_model(inside, load_data(inside, None)["train"])
