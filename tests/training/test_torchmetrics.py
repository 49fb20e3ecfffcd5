"""Metrics of torchmetrics have the value of one process on any number of ranks, for any division of the data."""

import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests._worlds import ranks
from tests._worlds.data import assert_refused, numbers, tensor
from torchmn.data import scatter_dataset
from torchmn.errors import ArgumentError, MismatchError
from torchmn.training import create_multi_node_evaluator, synchronize_torchmetrics, torchmetrics_sync

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method")  # a rank without data

torchmetrics = pytest.importorskip("torchmetrics")
classification = pytest.importorskip("torchmetrics.classification")

LENGTH = 31


def whole_set():
    scores = tensor(numbers((LENGTH, 3), 7), torch.float32).softmax(1)
    return TensorDataset(scores, torch.arange(LENGTH) * 7 % 3, torch.arange(LENGTH) // 5)


def several(**options):
    return torchmetrics.MetricCollection(
        {
            "precision": classification.MulticlassPrecision(3, **options),
            "recall": classification.MulticlassRecall(3, **options),  # shares the states of precision
            "auroc": classification.MulticlassAUROC(3, **options),
        }
    )


KINDS = {
    "sums": lambda **options: classification.MulticlassF1Score(3, average="macro", **options),
    "lists": lambda **options: classification.MulticlassAUROC(3, **options),
    "per class": lambda **options: classification.MulticlassAccuracy(3, average=None, **options),
    "confusion": lambda **options: classification.MulticlassConfusionMatrix(3, **options),
    "composed": lambda **options: (
        classification.MulticlassAccuracy(3, **options) + classification.MulticlassAUROC(3, **options)
    ),
    "wrapped": lambda **options: torchmetrics.wrappers.ClasswiseWrapper(
        classification.MulticlassF1Score(3, average=None, **options)
    ),
    "several": several,
}


def updated(metric, batches):
    for scores, targets, _ in batches:
        metric.update(scores, targets)
    return metric


def shares(comm):
    """Returns this rank's part for several divisions of the data: about equal parts, and one rank without data."""
    whole = whole_set()
    yield scatter_dataset(whole, comm, force_equal_length=False)
    ends = [0, *(LENGTH * k // comm.size for k in range(1, comm.size)), LENGTH]
    if comm.size > 1:
        ends[1] = 0  # rank 0 has nothing
    yield torch.utils.data.Subset(whole, range(ends[comm.rank], ends[comm.rank + 1]))


def as_lists(value):
    """Returns a value of torchmetrics in a form that can be compared."""
    if isinstance(value, dict):
        return {key: as_lists(inner) for key, inner in value.items()}
    return torch.as_tensor(value).double().flatten().tolist()


def assert_value(got, expected):
    got, expected = as_lists(got), as_lists(expected)
    if isinstance(expected, dict):
        assert set(got) == set(expected)
        for key, value in expected.items():
            assert got[key] == pytest.approx(value, rel=1e-6), key
    else:
        assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@ranks(1, 2, 3, on="threads")
@ranks(2, on=("mpi", "gloo"))
def test_the_hook_gives_the_value_of_all_ranks(comm, kind):
    expected = updated(KINDS[kind](), DataLoader(whole_set(), batch_size=8)).compute()
    for share in shares(comm):
        batches = list(DataLoader(share, batch_size=4))
        fresh = updated(KINDS[kind](**torchmetrics_sync(comm)), batches)
        assert_value(fresh.compute(), expected)
        assert_value(fresh.compute(), expected)
        existing = synchronize_torchmetrics(updated(KINDS[kind](), batches), comm)
        assert_value(existing.compute(), expected)
        existing.reset()
        assert_value(updated(existing, batches).compute(), expected)


@pytest.mark.parametrize("kind", KINDS)
@ranks(1, 2, 3, on="threads")
@ranks(2, on=("mpi", "gloo"))
def test_a_metric_that_an_evaluator_returns_is_that_of_all_ranks(comm, kind):
    expected = updated(KINDS[kind](), DataLoader(whole_set(), batch_size=8)).compute()
    hooked = torchmetrics_sync(comm)
    for share in shares(comm):
        for options in ({}, hooked):
            alone = create_multi_node_evaluator(
                lambda loader, options=options: updated(KINDS[kind](**options), loader), comm
            )
            assert_value(alone(DataLoader(share, batch_size=4)), expected)

        def evaluate(loader):
            metric = updated(KINDS[kind](), loader)
            metric.compute()  # one rank's value, kept by the metric
            right = sum(float((scores.argmax(1) == targets).sum()) for scores, targets, _ in loader)
            return {"score": metric, "accuracy": right / len(loader.dataset)}

        got = create_multi_node_evaluator(evaluate, comm)(DataLoader(share, batch_size=4))
        assert_value(got["score"], expected)
        scores, targets, _ = whole_set().tensors
        assert got["accuracy"] == pytest.approx((scores.argmax(1) == targets).double().mean().item(), rel=1e-12)


@ranks(1, 2, 3, on="threads")
def test_the_number_of_stored_updates_may_differ_between_ranks(comm):
    def evaluate(loader):
        metric = torchmetrics.retrieval.RetrievalMAP()
        for scores, targets, queries in loader:
            metric.update(scores[:, 0], targets == 0, indexes=queries)
        return metric

    expected = evaluate(DataLoader(whole_set(), batch_size=4)).compute().item()
    for share in shares(comm):
        everywhere = create_multi_node_evaluator(evaluate, comm)
        assert everywhere(DataLoader(share, batch_size=4)) == pytest.approx(expected, rel=1e-6)


@ranks(2, on="threads")
def test_repeated_items_do_not_count_in_a_returned_metric(comm):
    share = scatter_dataset(whole_set(), comm)
    assert sum(comm.allgather_obj(share.repeated)) == 1
    everywhere = create_multi_node_evaluator(lambda loader: {"f1": updated(KINDS["sums"](), loader)}, comm)
    expected = updated(KINDS["sums"](), DataLoader(whole_set(), batch_size=8)).compute().item()
    assert everywhere(DataLoader(share, batch_size=4)) == {"f1": pytest.approx(expected, rel=1e-6)}


@ranks(2, on="threads")
def test_ranks_that_compute_other_metrics_are_refused(comm):
    mine = ("sums", "per class")[comm.rank]
    everywhere = create_multi_node_evaluator(lambda: {"x": KINDS[mine]()}, comm)
    assert_refused(comm, everywhere, "metric 'x'", "MulticlassF1Score", "MulticlassAccuracy", kind=MismatchError)
    metric = updated(KINDS[("confusion", "lists")[comm.rank]](**torchmetrics_sync(comm)), DataLoader(whole_set(), 8))
    assert_refused(comm, metric.compute, "torchmetrics", "states of different kinds", kind=MismatchError)


@ranks(2, on="threads")
def test_copies_of_a_metric_that_has_the_hook(comm):
    metric = KINDS["sums"](**torchmetrics_sync(comm))
    share = list(DataLoader(torch.utils.data.Subset(whole_set(), range(comm.rank, LENGTH, 2)), batch_size=4))
    expected = updated(KINDS["sums"](), DataLoader(whole_set(), batch_size=8)).compute()
    assert_value(updated(metric.clone(), share).compute(), expected)
    here = updated(KINDS["sums"](), share).compute()
    assert_value(updated(pickle.loads(pickle.dumps(metric)), share).compute(), here)  # it belongs to no ranks


def test_arguments_that_are_not_metrics_are_refused():
    with pytest.raises(ArgumentError, match="expected comm to be a communicator"):
        torchmetrics_sync("world")


@ranks(1, on="solo")
def test_a_module_without_metrics_is_refused(comm):
    with pytest.raises(ArgumentError, match="a metric of torchmetrics, a collection"):
        synchronize_torchmetrics(nn.Linear(1, 1), comm)
