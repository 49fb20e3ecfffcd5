"""Layers with another optimizer than the experiment's, and biases with another one than the weights."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.experiment.running import (
    OptimizerRules,
    Ran,
    build_model,
    experiment,
    layer_optimizer_options,
    load_data,
    parameter_groups,
    train,
)
from torchmn.errors import ExperimentError

MIXED = """
dataset: {name: toy_images, side: 12, train: 40, test: 8}
model:
  layers:
    - conv: {maps: 4, kernel: 3, activation: relu, optimizer: {lr: 0.02, momentum: 0.0}}
    - max_pool: 2
    - linear: {units: 8, activation: tanh, optimizer: {name: adadelta, rho: 0.95, schedule: {step: [1], ratio: 0.5}},
               bias_optimizer: {lr: 0.2, weight_decay: 0.0}}
    - linear: {units: 4, bias_optimizer: {name: adadelta, rho: 0.95, schedule: {step: [1], ratio: 0.5}}}
  cost: cross_entropy
optimizer: {name: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01}
epochs: 2
batch_size: 8
dtype: float64
"""


@functools.cache
def alone() -> Ran:
    return train(experiment(MIXED))


def assert_like(ran: Ran, expected: Ran, losses: list[float]) -> None:
    assert losses == pytest.approx(expected.losses, rel=1e-9)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(ran.weights[name], weight, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(("ranks", "mode"), [(2, "datapar"), (3, "modelpar"), (4, "halopar"), (4, "halodatapar")])
def test_any_mode_gives_the_numbers_of_one_rank(ranks, mode):
    ran = train(experiment(MIXED), ranks, mode)
    assert_like(ran, alone(), ran.losses)


@pytest.mark.parametrize(("before", "after"), [((1, "datapar"), (1, "datapar")), ((2, "modelpar"), (3, "halopar"))])
def test_a_stopped_run_is_resumed_exactly(before, after, tmp_path):
    chosen = experiment(MIXED)
    first = train(chosen, *before, checkpoints=str(tmp_path), stop_after=6)
    second = train(chosen, *after, checkpoints=str(tmp_path), resume=True)
    assert_like(second, alone(), first.losses + second.losses)
    if after[0] == 1:
        assert first.losses + second.losses == alone().losses


def test_each_parameter_has_the_options_of_its_layer():
    chosen = experiment(MIXED)
    model = build_model(chosen, load_data(chosen, None)["train"])
    rules = OptimizerRules(chosen.optimizer, parameter_groups(model, layer_optimizer_options(model)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for epoch in (0, 1):
        rules.set_epoch(epoch, 2)
        for group in rules.optimizer.param_groups:
            kind = "adadelta" if "rho" in group else "sgd"
            options = (kind, group["lr"], group.get("momentum"), group["weight_decay"])
            found |= {(names[id(p)], epoch): options for p in group["params"]}
    assert {name: options for (name, epoch), options in found.items() if epoch == 0} == {
        "conv1.weight": ("sgd", 0.02, 0.0, 0.01),
        "conv1.bias": ("sgd", 0.02, 0.0, 0.01),
        "linear1.weight": ("adadelta", 1.0, None, 0.0),
        "linear1.bias": ("sgd", 0.2, 0.9, 0.0),
        "linear2.weight": ("sgd", 0.1, 0.9, 0.01),
        "linear2.bias": ("adadelta", 1.0, None, 0.0),
    }
    assert found["linear1.weight", 1] == ("adadelta", 0.5, None, 0.0)
    assert found["linear2.weight", 1] == found["linear2.weight", 0]


def test_the_numbers_are_those_of_separate_torch_optimizers():
    chosen = experiment(MIXED, "epochs=1", "batch_size=40")
    data = load_data(chosen, None)["train"]
    model = build_model(chosen, data).double()
    ours = train(chosen).weights
    conv, hidden, last = model.get_submodule("conv1"), model.get_submodule("linear1"), model.get_submodule("linear2")
    optimizers = [
        torch.optim.SGD([*conv.parameters()], 0.02, weight_decay=0.01),
        torch.optim.SGD([hidden.bias], 0.2, momentum=0.9),
        torch.optim.SGD([last.weight], 0.1, momentum=0.9, weight_decay=0.01),
        torch.optim.Adadelta([hidden.weight, last.bias], 1.0, rho=0.95),
    ]
    inputs, labels = data.take(torch.arange(40).numpy(), torch.float64)
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-9, atol=1e-12, msg=name)


def test_an_experiment_may_use_only_optimizers_of_layers():
    own = "optimizer: {name: adam, lr: 0.01}"
    text = f"""
dataset: {{name: toy_images, side: 8, train: 24, test: 8}}
model: {{layers: [{{linear: {{units: 4, {own}}}}}], cost: cross_entropy}}
optimizer: {{name: sgd, lr: 0.1}}
epochs: 1
batch_size: 8
"""
    expected = text.replace(f", {own}", "").replace("{name: sgd, lr: 0.1}", "{name: adam, lr: 0.01}")
    assert train(experiment(text)).losses == train(experiment(expected)).losses


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("optimizer: {name: adadelt}", r"x.yaml:2:56: there is no optimizer 'adadelt'. Did you mean 'adadelta'"),
        ("optimizer: {lr: 0.1, rho: 0.9}", "optimizer has no key 'rho'"),
        (
            "optimizer: fast",
            "optimizer to be options such as {lr: 0.001}, or the name of an optimizer, got 'fast'",
        ),
        ("bias_optimizer: {name: sgd}", "sgd needs the key 'lr'"),
    ],
)
def test_a_wrong_optimizer_of_a_layer_is_an_error_with_its_place(changed, message):
    text = f"""dataset: {{name: toy_images, side: 8}}
model: {{layers: [{{linear: {{units: 4, {changed}}}}}], cost: cross_entropy}}
optimizer: {{name: sgd, lr: 0.1}}
epochs: 1
batch_size: 8
"""
    with pytest.raises(ExperimentError, match=message):
        experiment(text)
