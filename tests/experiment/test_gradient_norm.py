"""The gradient norm of the log: of the mean gradient over all samples, with slices counted once."""

from __future__ import annotations

import math

import pytest
import torch

import torchmn
from tests.experiment.running import experiment, global_gradients, open_session, train
from tests.experiment.test_report import TEXT
from torchmn.parallel import gradient_norm

MODES = [(1, "datapar"), (2, "datapar"), (3, "datapar"), (2, "modelpar"), (3, "modelpar"), (2, "halopar"),
         (4, "halopar"), (4, "hybrid"), (4, "halodatapar")]  # fmt: skip


@pytest.mark.parametrize(("size", "mode"), MODES)
def test_it_is_that_of_the_global_gradients_on_every_rank(size, mode):
    chosen = experiment(TEXT, f"parallel.mode={mode}", "dtype=float64")

    def on_each(comm: torchmn.Communicator) -> tuple[float, float]:
        session = open_session(chosen, comm)
        session.begin_epoch(0)
        session.train_on(session.batches.rows(session.batches.order(0), 0), 0)
        gradients = [gradient.flatten() for gradient in global_gradients(session.placed.model).values()]
        return gradient_norm(session.placed.model), float(torch.cat(gradients).norm())

    found = torchmn.run_threads(on_each, size)
    assert len({norm for norm, _ in found}) == 1
    norm, expected = found[0]
    assert norm > 0 and norm == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("size", "mode"), [(3, "datapar"), (2, "modelpar"), (4, "halopar"), (4, "hybrid")])
def test_the_history_has_the_same_norm_at_any_number_of_ranks(size, mode):
    chosen = experiment(TEXT, "dtype=float64", "batch_size=25")  # the last of three batches has 10 samples
    norms = [[row["gradient norm"] for row in ran.history] for ran in (train(chosen), train(chosen, size, mode))]
    assert all(map(math.isfinite, norms[0])) and norms[1] == pytest.approx(norms[0], rel=1e-9)


def test_a_run_that_stops_after_the_last_whole_batch_resumes_with_its_norm(tmp_path):
    chosen = experiment(TEXT, "dtype=float64", "batch_size=25", "epochs=1")
    whole = train(chosen)
    options = {"checkpoints": str(tmp_path)}
    assert not train(chosen, **options, stop_after=2).finished
    resumed = train(chosen, 2, "modelpar", **options, resume=True)
    assert resumed.history[0]["gradient norm"] == pytest.approx(whole.history[0]["gradient norm"], rel=1e-9)
