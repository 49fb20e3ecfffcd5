"""Several costs with scales, units and targets, and costs of the whole batch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests._worlds import ranks
from tests.experiment.running import build_model, experiment, load_data, registry, train
from torchmn import Communicator
from torchmn.communicators.transports.group import Settings
from torchmn.communicators.transports.solo import SoloTransport
from torchmn.data.batches import rank_slice
from torchmn.errors import ExperimentError
from torchmn.experiment.run.objective import Objective, Term
from torchmn.experiment.vocabulary import schema  # noqa: F401  (schema registers the names)
from torchmn.experiment.vocabulary.scores import Outputs

OUTPUTS = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 5)))
LABELS = torch.tensor([0, 1, 1, 0, 2, 2, 1])
# A balance network: class units and uncorrelated style units, which together reconstruct the input.
BALANCE = """
dataset: {name: toy_images, side: 8, train: 22, test: 9, validation: 20%}
model:
  layers:
    - linear: {units: 12, activation: relu}
    - branch:
        - linear: {units: 4, activation: softmax}
        - linear: 2
    - branch:
        - identity
        - list:
            - linear: {units: 12, activation: relu}
            - linear: 64
  cost:
    - {name: cross_entropy, units: [0, 4], outputs: probabilities, scale: 10}
    - {name: cross_covariance, units: [0, 6], split: 4, scale: 10}
    - {name: sum_squared, units: [6, 70], target: inputs}
optimizer: {name: sgd, lr: 0.02}
epochs: 2
batch_size: 9
dtype: float64
metrics:
  train: [{name: misclassified, units: [0, 4]}]
  validation: [{name: auc, units: [0, 4]}, {name: log_loss, units: [0, 4], outputs: probabilities}]
  test: [{name: misclassified, units: [0, 4]}]
"""


def objective(comm, *costs) -> Objective:
    return Objective([Term.of(cost, "identity", "labels") for cost in costs], comm)


def cost(name: str, **options):
    return registry.costs.find(name)(**options)


def covariance(x: np.ndarray, split: int) -> float:
    """½ Σ C², with NumPy's own covariance."""
    return 0.5 * float((np.cov(x.T, bias=True)[:split, split:] ** 2).sum())


@ranks(1, 2, 3, on="threads")
def test_cross_covariance_and_its_gradient_are_those_of_the_whole_batch(comm):
    mine = rank_slice(7, comm.size, comm.rank)
    x = OUTPUTS[mine].clone().requires_grad_()
    losses = objective(comm, cost("cross_covariance", split=2, scale=3.0)).losses(Outputs(x), {"labels": LABELS[mine]})
    assert losses.tolist() == pytest.approx([3 * covariance(OUTPUTS.numpy(), 2)] * len(x))
    (losses.sum() / 7).backward()
    step, expected = 1e-6, np.zeros((7, 5))
    for place in np.ndindex(7, 5):
        near = [OUTPUTS.numpy().copy() for _ in range(2)]
        near[0][place] += step
        near[1][place] -= step
        expected[place] = 3 * (covariance(near[0], 2) - covariance(near[1], 2)) / (2 * step)
    np.testing.assert_allclose(x.grad.numpy(), expected[mine], atol=1e-8)


def test_costs_are_summed_with_their_scales_each_of_its_units_and_its_target():
    alone = Communicator(SoloTransport.of_world(Settings()))
    terms = [cost("cross_entropy", units=[0, 3], scale=2.0), cost("sum_squared", units=[3, 5], target="inputs")]
    inputs = torch.ones(7, 2, dtype=torch.float64)
    losses = objective(alone, *terms).losses(Outputs(OUTPUTS), {"labels": LABELS, "inputs": inputs})
    right = -torch.log_softmax(OUTPUTS[:, :3], dim=1)[range(7), LABELS]
    squares = ((OUTPUTS[:, 3:] - 1) ** 2).sum(dim=1) / 2
    assert losses.tolist() == pytest.approx((2 * right + squares).tolist())


@pytest.mark.parametrize(("size", "mode"), [(3, "datapar"), (2, "modelpar"), (4, "hybrid"), (2, "halopar")])
def test_a_balance_network_is_the_same_on_any_ranks(size, mode):
    chosen = experiment(BALANCE)
    serial, ran = train(chosen), train(chosen, size, mode)
    assert ran.losses == pytest.approx(serial.losses, rel=1e-9)
    names = [name for name in serial.history[-1] if name not in ("epoch", "loss")]
    assert names == ["train loss", "train misclassified", "validation loss", "validation auc", "validation log_loss",
                     "test loss", "test misclassified", "learning rate", "gradient norm"]  # fmt: skip
    for mine, theirs in zip(ran.history, serial.history, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (", outputs: probabilities, scale: 10", "", "cross_entropy of some units of a branch: set `outputs: scores`"),
        ("[6, 70]", "[6, 71]", "sum_squared: expected units within 0 to 70, the outputs of the model, got [6, 71]"),
        ("[6, 70]", "[6, 69]", "the outputs have shape 63, and should reconstruct inputs of 1 x 8 x 8"),
        ("[0, 6], split: 4", "[0, 4], split: 4", "cross_covariance: expected a split below 4 units, got 4"),
        ("units: [0, 6]", "units: [6, 0]", "expected cross_covariance's units to be the first unit and the one after"),
        ("scale: 10}\n    - {name: sum", "scale: 0}\n    - {name: sum", "cross_covariance's scale to be more than 0"),
        ("name: sum_squared", "name: sum_square", "there is no cost 'sum_square'. Did you mean 'sum_squared'?"),
        ("  train: [", "  trian: [", "metrics has no key 'trian'. Did you mean 'train'?"),
        ("  train: [{name: misclassified, units: [0, 4]}]", "  train: auc", "expected train to be a list of metrics"),
        ("validation: 20%", "validation: 0%", "expected toy_images's validation to be a fraction of the data"),
        ("validation: 20%", "validation: 1%", "0.01 of 22 samples for validation leaves one part empty"),
    ],
)
def test_costs_that_do_not_fit_are_reported_with_their_place(old, new, message):
    assert BALANCE.count(old) == 1, old

    def build() -> None:
        chosen = experiment(BALANCE.replace(old, new))
        build_model(chosen, load_data(chosen, None)["train"])

    with pytest.raises(ExperimentError) as error:
        build()
    assert message in str(error.value) and str(error.value).startswith("x.yaml:")


def test_metrics_of_a_missing_split_raise_an_error_with_a_remedy():
    with pytest.raises(ExperimentError, match=r"metrics need validation samples, and there are only train, test. Set"):
        train(experiment(BALANCE.replace(", validation: 20%", "")))


def test_held_out_samples_are_not_trained_on_and_the_same_for_a_seed():
    text = BALANCE.replace("train: 22", "train: 200")
    splits = load_data(experiment(text), None)
    assert [len(splits[name]) for name in ("train", "validation", "test")] == [160, 40, 9]
    rows = {row.tobytes() for row in np.asarray(splits["train"].inputs)}
    assert not rows & {row.tobytes() for row in np.asarray(splits["validation"].inputs)}
    again = load_data(experiment(text), None)["validation"]
    assert np.array_equal(again.inputs, splits["validation"].inputs)


def test_the_balance_network_of_the_documentation_can_be_built():
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    (text,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if "cross_covariance" in block]
    chosen = experiment(text, "dataset.sample=1%")
    assert build_model(chosen, load_data(chosen, None)["train"]) is not None


@pytest.mark.parametrize(
    ("layers", "activation"),
    [
        ("[linear: {units: 4, activation: softmax}, flatten]", "softmax"),
        ("[linear: 4, dropout: 0.1, softmax, identity]", "softmax"),
        ("[linear: {units: 6, activation: logistic}, list: [slice: {last: 4}, reshape: [4]]]", "logistic"),
        ("[branch: [linear: {units: 2, activation: logistic}, list: [linear: 2, logistic]]]", "logistic"),
        ("[linear: {units: 4, activation: softmax}, linear: 4]", "identity"),
        ("[branch: [linear: 2, linear: {units: 2, activation: relu}]]", "identity"),
    ],
)
def test_the_activation_of_outputs_is_seen_through_layers_that_keep_values(layers, activation):
    spec = experiment(BALANCE, f"model.layers={layers}", "model.cost=cross_entropy").model
    assert spec.activation_of(spec.costs[0]) == activation


def test_cross_entropy_after_a_flattened_softmax_is_that_of_probabilities():
    plain = "model.layers=[linear: {units: 4, activation: softmax}%s]"
    changes = ("model.cost=cross_entropy", "metrics=[log_loss]")
    bare, flattened = (train(experiment(BALANCE, plain % more, *changes)) for more in ("", ", flatten"))
    assert flattened.losses == bare.losses and flattened.history == bare.history
