"""Costs, metrics, schedules and optimizers, compared with their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from tests.experiment.running import Schedule, by_label, registry
from torchmn.errors import ExperimentError

SCORES = tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.5, 2.5], [0.2, 0.1, 0.3]], dtype=torch.float64)
LABELS = tensor([0, 2, 2, 1])


def metric(name: str, outputs=SCORES, targets=LABELS, activation: str = "identity", **options) -> float:
    measure = registry.metrics.find(name)(**options).build(activation)
    values = measure.of(outputs, targets)
    return float(values) if measure.needs_all else measure.finish(float(values.sum()), len(targets))


def cost(name: str, activation: str = "identity", outputs=SCORES, targets=LABELS) -> list[float]:
    return registry.costs.find(name)().build(activation)(outputs, targets).tolist()


def test_misclassification_in_its_four_forms_and_with_top():
    assert metric("misclassified") == 0.5 and metric("accuracy") == 0.5
    assert metric("misclassified_sum") == 2 and metric("misclassified_percentage") == 50
    assert metric("misclassified", top=2) == 0.25 and metric("misclassified", top=7) == 0


def test_the_label_of_a_metric_has_its_options():
    some = [registry.metrics.find("misclassified")(**options) for options in ({}, {"top": 5})]
    assert list(by_label(some)) == ["misclassified", "misclassified top 5"]


def test_labels_of_metrics_of_different_units_differ():
    some = [registry.metrics.find("accuracy")(units=units) for units in ([0, 4], [4, 8])]
    assert list(by_label(some)) == ["accuracy units 0-4", "accuracy units 4-8"]
    assert list(by_label(some[:1])) == ["accuracy"]


def test_log_loss_is_the_same_for_scores_and_probabilities():
    p = torch.softmax(SCORES, dim=1)
    expected = [-math.log(p[row, label]) for row, label in enumerate(LABELS.tolist())]
    assert metric("log_loss") == pytest.approx(sum(expected) / 4)
    assert metric("log_loss_sum") == pytest.approx(sum(expected))
    assert metric("log_loss", p, activation="softmax") == pytest.approx(sum(expected) / 4)
    assert cost("cross_entropy") == pytest.approx(expected)
    assert cost("cross_entropy", "softmax", p) == pytest.approx(expected)


def test_after_logistic_outputs_cross_entropy_is_binary():
    p, wanted = torch.sigmoid(SCORES), torch.nn.functional.one_hot(LABELS, 3)
    expected = -(wanted * p.log() + (1 - wanted) * (1 - p).log()).sum(dim=1)
    assert cost("cross_entropy", "logistic", p) == pytest.approx(expected.tolist())
    assert cost("binary_cross_entropy") == pytest.approx(expected.tolist())


def test_squares_are_halved_summed_or_averaged():
    values = tensor([[1.0, 0.0], [2.0, 2.0]])
    targets = tensor([[0.0, 0.0], [0.0, 1.0]])
    assert cost("sum_squared", outputs=values, targets=targets) == [0.5, 2.5]
    assert cost("mean_squared", outputs=values, targets=targets) == [0.5, 2.5]
    assert cost("absolute", outputs=values, targets=targets) == [1.0, 3.0]
    assert metric("sse", values, targets) == 6.0 and metric("mse", values, targets) == 1.5
    assert cost("sum_squared", targets=LABELS)[0] == pytest.approx(((2 - 1) ** 2 + 1 + 0) / 2)


def test_area_under_the_curve_counts_pairs_with_ties_as_halves():
    scores, labels = tensor([[0, 1.0], [0, 2.0], [0, 2.0], [0, 0.5]]), tensor([0, 1, 0, 1])
    # Pairs of a positive and a negative: (2 > 1), (2 = 2), (0.5 < 1), (0.5 < 2).
    assert metric("auc", scores, labels) == pytest.approx((1 + 0.5 + 0 + 0) / 4)
    one_against_rest = []
    for k in range(3):
        positive, negative = SCORES[k == LABELS, k], SCORES[k != LABELS, k]
        pairs = [float(a > b) + float(a == b) / 2 for a in positive for b in negative]
        one_against_rest.append(sum(pairs) / len(pairs))
    assert metric("auc") == pytest.approx(sum(one_against_rest) / 3)
    assert math.isnan(metric("auc", SCORES, tensor([1, 1, 1, 1])[: len(SCORES)]))


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ({"step": [1, 3], "ratio": 0.5}, [1, 0.5, 0.5, 0.25, 0.25]),
        ({"every": 2}, [1, 1, 0.1, 0.1, 0.01]),
        ({"exponential": 0.5}, [1, 0.5, 0.25, 0.125, 0.0625]),
        ({"linear": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"cosine": 0.0}, [1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0]),
    ],
)
def test_schedules_depend_on_the_epoch_alone(schedule, factors):
    assert [Schedule(**schedule).factor(epoch, 5) for epoch in range(5)] == pytest.approx(factors)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adadelta", "rmsprop", "adagrad"])
def test_every_optimizer_decreases_a_loss(name):
    options = registry.optimizers.find(name)(lr=0.1)
    weight = torch.nn.Parameter(tensor([3.0, -2.0]))
    optimizer = options.build([{"params": [weight], "lr": 0.05, "own_momentum": True}])
    options.set_epoch(optimizer, 0, 1)
    assert optimizer.param_groups[0]["lr"] == 0.05
    for _ in range(5):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
    assert float((weight.detach() ** 2).sum()) < 13.0


@pytest.mark.parametrize("name", ["adam", "adamw", "adadelta", "adagrad", "rmsprop"])
def test_momentum_of_a_layer_raises_an_error_if_the_optimizer_has_none(name):
    options = registry.optimizers.find(name)(lr=0.1)
    group = {"params": [torch.nn.Parameter(tensor([1.0]))], "momentum": 0.5, "own_momentum": True, "ramp": {}}
    what = "momentum ramp" if name == "rmsprop" else "momentum, but"
    with pytest.raises(ExperimentError, match=f"{name} has no {what}"):
        options.build([group])


@pytest.mark.parametrize(
    ("options", "epoch"), [({"lr": 1e308}, 0), ({"lr": 0.1, "schedule": Schedule(exponential=1e200)}, 2)]
)
def test_a_learning_rate_that_is_too_large_for_torch_raises_an_error(options, epoch):
    rule = registry.optimizers.find("sgd")(**options)
    optimizer = rule.build([{"params": [torch.nn.Parameter(tensor([1.0]))]}])
    with pytest.raises(ExperimentError, match=f"the learning rate of epoch {epoch + 1} would be"):
        rule.set_epoch(optimizer, epoch, 9)
