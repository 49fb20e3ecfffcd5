"""`init_process_group`: libraries that use torch.distributed get the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

import torchmn
from tests._worlds import ranks
from tests._worlds.jobs import run_job
from torchmn.training import torchmetrics_sync
from torchmn.training.named_torchmetrics import NamedMetric

SAMPLES, CLASSES = 13, 3


@contextmanager
def default_group(comm: torchmn.Communicator) -> Iterator[None]:
    torchmn.init_process_group(comm)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "RANK"])
@ranks(1, 2, 3, on="mpi", timeout=60)
def test_the_group_has_the_ranks_of_the_communicator_without_variables_of_torch(comm, variable, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    with default_group(comm):
        assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
        total = torch.tensor([comm.rank + 1.0])
        dist.all_reduce(total)
        assert total.item() == comm.size * (comm.size + 1) / 2
        torchmn.init_process_group(comm)  # does nothing


@ranks(1, 2, 3, on="mpi", timeout=60)
def test_samplers_and_torchmetrics_use_the_group(comm):
    torch.manual_seed(0)
    scores, labels = torch.rand(SAMPLES, CLASSES), torch.randint(CLASSES, (SAMPLES,))
    data, whole = TensorDataset(scores, labels), MulticlassAccuracy(CLASSES, average="micro")
    with default_group(comm):
        sampler = DistributedSampler(data, shuffle=False, drop_last=True)
        assert list(sampler) == list(range(comm.rank, SAMPLES // comm.size * comm.size, comm.size))
        metric = MulticlassAccuracy(CLASSES, average="micro")
        for x, t in DataLoader(data, batch_size=2, sampler=sampler):
            metric.update(x, t)
        used = SAMPLES // comm.size * comm.size
        assert metric.compute() == whole(scores[:used], labels[:used])


@ranks(3, on="mpi", timeout=60)
def test_metrics_count_every_sample_once_in_the_presence_of_a_default_group(comm):
    torch.manual_seed(0)
    scores, labels = torch.rand(SAMPLES, CLASSES).softmax(1), torch.arange(SAMPLES) % CLASSES
    own = slice(comm.rank, None, comm.size)  # of uneven lengths

    def updated(metric):
        metric.update(scores[own], labels[own])
        return metric

    for name, make in (
        ("MulticlassAUROC", MulticlassAUROC),
        ("MulticlassF1Score", partial(MulticlassF1Score, average="macro")),
    ):
        expected = float(make(CLASSES)(scores, labels))
        with default_group(comm):
            assert float(updated(make(CLASSES, **torchmetrics_sync(comm))).compute()) == pytest.approx(expected)
            evaluate = torchmn.create_multi_node_evaluator(lambda make=make: {"value": updated(make(CLASSES))}, comm)
            assert evaluate()["value"] == pytest.approx(expected)
            of_a_file = NamedMetric(f"classification.{name}", {"average": "macro"})
            assert float(of_a_file.value(scores, labels, "softmax")) == pytest.approx(expected)


@ranks(3, on="mpi", timeout=60)
def test_a_group_of_another_size_is_an_error_with_both_sizes(comm):
    part = comm.split(min(comm.rank, 1), comm.rank)
    with (
        default_group(comm),
        pytest.raises(torchmn.ArgumentError, match=rf"group of 3 ranks.*the communicator has {part.size} rank"),
    ):
        torchmn.init_process_group(part)


@ranks(2, on="gloo", timeout=60)
def test_ranks_of_torchrun_get_a_group_too(comm):
    with default_group(comm):
        assert dist.get_world_size() == comm.size


def test_ranks_that_are_threads_are_refused():
    def work(comm):
        with pytest.raises(torchmn.ArgumentError, match="got threads"):
            torchmn.init_process_group(comm)

    torchmn.run_threads(work, 2)


LEFT_OPEN = """
import atexit
import torch.distributed as dist
import torchmn

comm = torchmn.create_communicator()
atexit.register(lambda: print("open at exit:", dist.is_initialized()))  # runs after handlers that are registered later
torchmn.init_process_group(comm)
dist.barrier()
"""


def test_a_group_that_a_program_leaves_open_is_destroyed_before_the_interpreter_shuts_down():
    job = run_job(LEFT_OPEN, 2, "mpi")
    assert job.returncode == 0 and job.output.count("open at exit: False") == 2, job.output
