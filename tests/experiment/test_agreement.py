"""Different files or data on some ranks are an error on all ranks, before training begins."""

from __future__ import annotations

import numpy as np
import pytest

from tests.experiment.running import (
    dataset_fingerprint,
    experiment,
    load_data,
    on_every_rank,
    open_session,
    parallel,
    plain,
    registry,
    train,
    verify,
)
from torchmn import run_threads
from torchmn.errors import ExperimentError, PeerError

TEXT = """
dataset: {name: toy_images, side: 8, train: 12, test: 4}
model: {layers: [linear: 4], cost: cross_entropy}
optimizer: {name: sgd, lr: 0.1}
epochs: 1
batch_size: 6
"""


def assert_all_raise(work, message: str, size: int = 3) -> None:
    """Checks that `work(comm)` raises an ExperimentError on every rank, with the same message."""

    def body(comm):
        with pytest.raises(ExperimentError, match=message) as error:
            work(comm)
        return str(error.value)

    assert len(set(run_threads(body, size))) == 1


def test_an_error_on_one_rank_is_raised_on_all_with_its_rank():
    def work(comm):
        def read():
            if comm.rank == 1:
                raise ExperimentError("x.yaml:1:1: nothing there")
            return 1

        on_every_rank(comm, "experiment", read, lambda value: value)

    assert_all_raise(work, r"rank 1 of 3: experiment: x\.yaml:1:1: nothing there")


def test_an_error_on_all_ranks_reads_as_on_one_rank():
    def work(comm):
        on_every_rank(comm, "experiment", lambda: experiment(TEXT, "epochs=0"), plain)

    assert_all_raise(work, r"^--set epochs=0: expected epochs to be at least 1, got 0$")


def test_a_different_experiment_on_a_rank_is_an_error_that_names_the_key():
    def work(comm):
        on_every_rank(
            comm, "experiment", lambda: experiment(TEXT, f"optimizer.lr={0.1 if comm.rank < 2 else 0.2}"), plain
        )

    assert_all_raise(work, r"experiment\.optimizer\.lr is 0\.1 on rank 0 of 3, on .*, and 0\.2 on rank 2, on")


@pytest.mark.parametrize("change", ["dataset.train=11", "dataset.seed=3", "dataset.side=9"])
def test_different_data_on_a_rank_is_an_error_before_training(change):
    def work(comm):
        open_session(experiment(TEXT, *([change] if comm.rank == 1 else [])), comm)

    assert_all_raise(work, r"toy_images\.train\.(samples|shape\.1|checksum of targets) is .* on rank 0 .* on rank 1", 2)


def test_data_that_differ_only_in_inputs_are_detected():
    splits = load_data(experiment(TEXT), None)
    before = dataset_fingerprint(splits)
    splits["test"].inputs[3] += np.ones((1, 8, 8), dtype=splits["test"].inputs.dtype)
    after = dataset_fingerprint(splits)
    assert before["train"] == after["train"] and before["test"] != after["test"]


@pytest.fixture
def own_mean():
    registry.register_cost("own_mean")(lambda: lambda outputs, targets: outputs.mean())
    yield
    del registry.costs.entries["own_mean"]


def test_verify_raises_errors_of_its_run_on_one_rank_on_every_rank(own_mean):
    chosen = experiment(TEXT, "model.cost=own_mean")
    assert_all_raise(lambda comm: list(verify(chosen, comm, 1)), "own_mean: expected one number per sample")


def test_a_lost_rank_is_not_reported_as_an_impossible_mode(monkeypatch):
    def lost(*_):
        raise PeerError("rank 1 left")

    def body(comm):
        with pytest.raises(PeerError, match=r"^rank 1 left$"):
            open_session(experiment(TEXT), comm)

    monkeypatch.setattr(parallel, "place_on_grid", lost)
    run_threads(body, 2)


def test_equal_results_on_all_ranks_are_returned():
    assert train(experiment(TEXT), 2).finished
