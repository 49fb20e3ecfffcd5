"""Costs and metrics of saturated softmax and logistic outputs are computed from the scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

import torchmn
from tests.experiment.running import build_model, evaluate, experiment, load_data, open_session, predict, read, train
from torchmn import Communicator
from torchmn.communicators.transports.group import Settings
from torchmn.communicators.transports.solo import SoloTransport
from torchmn.errors import ExperimentError
from torchmn.experiment import parse_set
from torchmn.experiment.run.session import Session
from torchmn.experiment.vocabulary.scores import Probabilities, log_complement_p, log_p

# Scores of some hundreds: in float32 and in float64 every probability is 0 or 1.
TEXT = """
dataset: {name: random, shape: [1, 6, 6], classes: 4, train: 22, test: 9}
model:
  layers:
    - conv: {maps: 2, kernel: 3, init: {name: gaussian, std: 1.0}, activation: tanh}
    - linear: {units: 4, init: {name: gaussian, std: 300.0}, activation: %s}
  cost: %s
optimizer: {name: sgd, lr: 1.0}
epochs: 1
batch_size: 22
metrics: [log_loss, misclassified]
"""
KINDS = [(a, c) for a in ("logistic", "softmax") for c in ("cross_entropy", "binary_cross_entropy")]


def alone(chosen) -> Session:
    return open_session(chosen, Communicator(SoloTransport.of_world(Settings())))


def scores_of(chosen, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scores of the initial model, as a leaf tensor, and the labels; in the order of the data."""
    data = load_data(chosen, None)
    inputs, labels = data[split].take(slice(None), torch.float64)
    model = build_model(chosen, data["train"]).double()
    return model[:-1](inputs).detach().requires_grad_(), labels


def losses(scores: torch.Tensor, labels: torch.Tensor, activation: str, cost: str) -> torch.Tensor:
    """Losses by torch's functions; binary cross-entropy of softmax from the definition."""
    if activation == "logistic":
        wanted = functional.one_hot(labels, 4).double()
        return functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none").sum(1)
    if cost == "cross_entropy":
        return functional.cross_entropy(scores, labels, reduction="none")
    total = scores.logsumexp(1)
    rest = [scores[:, [j for j in range(4) if j != k]].logsumexp(1) - total for k in range(4)]
    wanted = functional.one_hot(labels, 4).double()
    return -(wanted * (scores - total[:, None]) + (1 - wanted) * torch.stack(rest, 1)).sum(1)


@pytest.mark.parametrize(("activation", "cost"), KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loss_and_gradient_of_saturated_outputs_are_those_of_the_scores(activation, cost, dtype):
    chosen = experiment(TEXT % (activation, cost), f"dtype={dtype}")
    session = alone(chosen)
    scores, labels = scores_of(chosen)
    expected = losses(scores, labels, activation, cost).mean()
    (gradient,) = torch.autograd.grad(expected, scores)
    assert expected.item() > 50 and float(gradient.abs().max()) > 0.01
    ran = train(chosen)
    assert ran.losses[0] == pytest.approx(expected.item(), rel=1e-5)
    bias = session.placed.model.get_parameter(
        "linear1.bias"
    ).detach()  # its gradient is the sum of the gradients of the scores
    moved = (bias - ran.weights["linear1.bias"]).double()
    torch.testing.assert_close(moved, gradient.sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "mode"), [(3, "datapar"), (2, "modelpar"), (4, "hybrid"), (2, "halopar")])
@pytest.mark.parametrize("activation", ["logistic", "softmax"])
def test_saturated_outputs_give_the_same_numbers_in_every_mode(size, mode, activation):
    chosen = experiment(TEXT % (activation, "cross_entropy"), "dtype=float64", "epochs=3", "batch_size=9")
    serial, ran = train(chosen), train(chosen, size, mode)
    assert ran.losses == pytest.approx(serial.losses, rel=1e-9)
    assert ran.history == [pytest.approx(row, rel=1e-9) for row in serial.history]
    for name, weight in serial.weights.items():
        torch.testing.assert_close(ran.weights[name], weight, rtol=1e-9, atol=1e-9)


def test_images_behind_logistic_are_the_same_on_tiles():
    text = """
dataset: {name: random, shape: [1, 9, 8], classes: 2, train: 12, test: 6}
model:
  layers: [conv: {maps: 3, kernel: 3, padding: same, init: {name: gaussian, std: 40.0}}, conv: {maps: 1, kernel: 1,
           init: {name: gaussian, std: 40.0}, activation: logistic}, flatten, reshape: [72]]
  cost: binary_cross_entropy
  target: inputs
optimizer: {name: sgd, lr: 0.001}
epochs: 2
batch_size: 6
dtype: float64
"""
    chosen = experiment(text)
    serial, ran = train(chosen), train(chosen, 3, "halopar")
    assert serial.losses[0] > 72 * 10 and ran.losses == pytest.approx(serial.losses, rel=1e-9)


def test_metrics_of_saturated_outputs_are_those_of_the_scores():
    for activation in ("logistic", "softmax"):
        chosen = experiment(TEXT % (activation, "cross_entropy"))
        scores, labels = scores_of(chosen, "test")
        log = functional.logsigmoid(scores) if activation == "logistic" else scores.log_softmax(1)
        expected = functional.cross_entropy(log, labels)
        measured = evaluate(alone(chosen), "test")
        assert measured["log_loss"] == pytest.approx(expected.item(), rel=1e-5) and expected > 50
        assert measured["misclassified"] == float((scores.argmax(1) != labels).double().mean())


@pytest.mark.parametrize("size", [1, 2])
def test_predictions_are_probabilities(size):
    for activation in ("logistic", "softmax"):
        chosen = experiment((TEXT % (activation, "cross_entropy")).replace("300.0", "1.0"), "parallel.mode=modelpar")
        outputs, _ = torchmn.run_threads(lambda comm, c=chosen: predict(open_session(c, comm), "test"), size)[0]
        scores, _ = scores_of(chosen, "test")
        expected = scores.sigmoid() if activation == "logistic" else scores.softmax(1)
        torch.testing.assert_close(torch.from_numpy(outputs).double(), expected.detach(), rtol=1e-4, atol=1e-6)


def test_a_checkpoint_has_the_keys_of_the_model_alone():
    chosen = experiment(TEXT % KINDS[0])
    model = build_model(chosen, load_data(chosen, None)["train"])
    assert list(alone(chosen).placed.model.state_dict()) == list(model.state_dict())


def test_neons_mlp_learns_after_its_first_steps_have_saturated_all_outputs():
    """In `make neon-results` on the full MNIST; here on the sample that comes with TorchMN."""
    file = Path(__file__).parents[2] / "benchmarks" / "neon" / "mnist_mlp-784-512-10.yaml"
    ran = train(read(file.name, file.read_text(), [parse_set("epochs=2")]))
    assert max(ran.losses[:5]) > 30  # a clipped cost would stay at 16.118
    assert ran.history[-1]["test misclassified_percentage"] < 25


BRANCHES = """
dataset: {name: random, shape: [5], classes: 3, train: 8, test: 4}
model:
  layers: %s
  cost: [{name: cross_entropy, units: [2, 5], outputs: probabilities}]
optimizer: {name: sgd, lr: 1.0}
epochs: 1
batch_size: 8
dtype: float64
"""
WIDE = "linear: {units: 3, init: {name: gaussian, std: 900.0}, activation: softmax}"


@pytest.mark.parametrize(
    "layers",
    [
        f"[branch: [linear: 2, {WIDE}]]",
        f"[branch: [linear: 2, {WIDE}], branch: [identity, list: [linear: 4, tanh]]]",
        f"[branch: [linear: 2, list: [{WIDE}, reshape: [3, 1], flatten]], slice: {{last: 5}}]",
    ],
)
def test_the_probabilities_of_a_branch_come_from_its_scores(layers):
    session = alone(experiment(BRANCHES % layers))
    rows = session.batches.order(0)
    inputs, labels = session.batch(session.splits["train"], rows)
    outputs = session.placed.forward(inputs)
    saturated = outputs.values[:, 2:5].gather(1, labels[:, None])
    assert (saturated == 0).any() and len(outputs.scores) == 1
    expected = functional.cross_entropy(outputs.scores[0], labels)
    got = session.losses(outputs, labels, session.splits["train"], rows).mean()
    assert got.item() == pytest.approx(expected.item()) and torch.isfinite(got) and expected > 50


def test_probabilities_without_known_scores_keep_their_gradient_until_they_round_to_zero():
    p = torch.tensor([1e-30, 0.5], requires_grad=True)
    Probabilities.of_values(p).log.sum().backward()
    assert p.grad is not None and float(p.grad[0]) == pytest.approx(1e30)
    given = Probabilities.of_values(torch.tensor([0.0, 1.0]))
    assert torch.isfinite(given.log).all() and torch.isfinite(given.log_complement).all()


def test_logarithms_of_small_scores_are_those_of_the_definition():
    scores = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for activation, p in (("softmax", scores.softmax(1)), ("logistic", scores.sigmoid())):
        torch.testing.assert_close(log_p(scores, activation), p.log())
        torch.testing.assert_close(log_complement_p(scores, activation), (1 - p).log())
    assert torch.autograd.gradcheck(lambda x: log_complement_p(x, "softmax"), scores[:3].requires_grad_())


@pytest.mark.parametrize(
    ("layers", "cost", "message"),
    [
        ("[linear: {units: 4, activation: softmax}, dropout: 0.1]", "cross_entropy", "which have no logarithm"),
        ("[linear: 4, list: [logistic, dropout: 0.1], flatten]", "binary_cross_entropy", "which have no logarithm"),
        ("[linear: 1, softmax]", "binary_cross_entropy", "softmax of one unit is always 1"),
    ],
)
def test_a_cost_without_logarithm_raises_an_error(layers, cost, message):
    change = "dataset.classes=1" if "linear: 1" in layers else "seed=0"
    with pytest.raises(ExperimentError, match=message):
        alone(experiment(TEXT % KINDS[0], f"model.layers={layers}", f"model.cost={cost}", change))


OWN = """
imports: [outputs_of_its_own]
dataset: {name: random, shape: [6], classes: 4, train: 12, test: 9}
model: {module: outputs_of_its_own.Net, cost: {name: cross_entropy, outputs: probabilities}}
optimizer: {name: sgd, lr: 0.1}
epochs: 1
batch_size: 12
metrics: [log_loss]
"""
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, x):
        return torch.softmax(self.linear(x), dim=1)
"""


def test_a_metric_reads_the_outputs_of_a_module_as_its_cost_does(tmp_path, monkeypatch):
    (tmp_path / "outputs_of_its_own.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    found = evaluate(alone(experiment(OWN)), "test")
    assert found["log_loss"] == pytest.approx(found["loss"], rel=1e-6)
