"""Metrics of torchmetrics in experiment files have the values of one rank, in every mode and for uneven sizes."""

from __future__ import annotations

import sys

import pytest
import torch

import torchmn
from tests.experiment.files import BASE
from tests.experiment.running import evaluate, experiment, json_schema, open_session, predict, read, train
from torchmn.errors import ExperimentError
from torchmn.experiment import dump

classification = pytest.importorskip("torchmetrics.classification")

METRICS = """\
metrics:
  - accuracy
  - auc
  - {torchmetrics: classification.MulticlassAccuracy, average: micro}
  - {torchmetrics: classification.MulticlassF1Score, average: macro}
  - {torchmetrics: classification.MulticlassAUROC}
  - {torchmetrics: Accuracy, task: multiclass, top_k: 2, average: micro}
"""
NAMES = [
    "accuracy", "auc", "MulticlassAccuracy average micro", "MulticlassF1Score average macro", "MulticlassAUROC",
    "Accuracy task multiclass top_k 2 average micro",
]  # fmt: skip
# 31 test samples in batches of 17: 2, 3 and 4 ranks get uneven parts of every batch.
SMALL = BASE.replace("{name: mnist, sample: 10%}", "{name: random, shape: [1, 8, 8], train: 40, test: 31}")
TEXT = SMALL.replace("batch_size: 50", "batch_size: 17") + "dtype: float64\n" + METRICS


@pytest.fixture(scope="module")
def one_rank():
    return train(experiment(TEXT)).history[-1]


@pytest.mark.parametrize(
    ("mode", "ranks"), [("datapar", 2), ("datapar", 3), ("modelpar", 3), ("halopar", 3), ("halodatapar", 4)]
)
def test_values_are_those_of_one_rank(mode, ranks, one_rank):
    got = train(experiment(TEXT), ranks, mode).history[-1]
    for name in NAMES:
        assert got[f"test {name}"] == pytest.approx(one_rank[f"test {name}"], rel=1e-9), name


def test_values_are_those_of_torchmetrics_and_of_our_metrics():
    def work(comm):
        session = open_session(experiment(TEXT), comm)
        return evaluate(session, "test"), predict(session, "test")

    values, (outputs, targets) = torchmn.run_threads(work, 3)[1]
    p, labels = torch.from_numpy(outputs).softmax(1), torch.from_numpy(targets)
    f1 = classification.MulticlassF1Score(10, average="macro")
    auroc = classification.MulticlassAUROC(10)
    assert values["MulticlassF1Score average macro"] == pytest.approx(float(f1(p, labels)), rel=1e-6)
    assert values["MulticlassAUROC"] == pytest.approx(float(auroc(p, labels)), rel=1e-6)
    assert values["MulticlassAccuracy average micro"] == pytest.approx(values["accuracy"], rel=1e-6)


def test_scores_between_0_and_1_are_not_taken_for_probabilities():
    metric = experiment(TEXT).metrics_by_split()[""][4].build("identity")
    scores, labels = torch.rand(31, 3), torch.arange(31) % 3
    expected = classification.MulticlassAUROC(3)(scores.softmax(1), labels)
    assert float(metric.of(scores, labels)) == pytest.approx(float(expected), rel=1e-6)


def test_regression_and_binary_metrics_take_one_output():
    found = read("x.yaml", TEXT + "  - {torchmetrics: regression.MeanSquaredError, squared: false}\n")
    root = found.metrics_by_split()[""][-1].build("identity")
    x, t = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 1.0])
    assert float(root.of(x, t)) == pytest.approx(3**0.5)
    found = read("x.yaml", TEXT + "  - {torchmetrics: classification.BinaryAUROC}\n")
    binary = found.metrics_by_split()[""][-1].build("identity")
    assert float(binary.of(torch.tensor([[-3.0], [0.5], [2.0]]), torch.tensor([0, 1, 0]))) == pytest.approx(0.5)


def test_a_file_that_is_saved_has_the_same_metrics():
    text = dump(experiment(TEXT))
    assert "MulticlassF1Score" in text and dump(read("again.yaml", text)) == text


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("{torchmetrics: classification.MulticlassF1, average: macro}", "Did you mean 'MulticlassF1Score'"),
        ("{torchmetrics: classification.MulticlassF1Score, avrage: macro}", "avrage"),
        ("{torchmetrics: classification.MulticlassF1Score, average: none}", "10 numbers"),
        ("{torchmetrics: classification.MulticlassConfusionMatrix}", "100 numbers"),
        ("{torchmetrics: text.BERTScore}", "torchmetrics.classification or torchmetrics.regression"),
        ("{torchmetrics: subprocess.Popen}", "torchmetrics.classification or torchmetrics.regression"),
        ("{torchmetrics: regression.R2Score}", "R2Score"),
    ],
)
def test_a_metric_that_cannot_be_computed_is_an_error_before_training(metric, words):
    wrong = experiment(SMALL + f"metrics: [{metric}]\n")

    def work(comm):
        with pytest.raises(ExperimentError) as raised:
            open_session(wrong, comm)
        return str(raised.value)

    for text in torchmn.run_threads(work, 2):
        assert text.startswith("x.yaml:11:") and words in text, text


def test_without_torchmetrics_the_error_has_the_line_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ExperimentError, match="pip install 'torchmetrics"):
        torchmn.run_threads(lambda comm: open_session(experiment(TEXT), comm), 1)


def test_the_schema_accepts_the_short_form():
    (entry,) = [
        each for each in json_schema()["$defs"]["metric"]["anyOf"] if "torchmetrics" in each.get("required", [])
    ]
    assert "name" not in entry["required"] and entry["additionalProperties"] is True
