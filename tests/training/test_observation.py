"""ObservationAggregator and MultiNodeEarlyStopping: one value and one decision for all ranks."""

import numpy as np
import pytest
import torch

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused
from torchmn.training import MultiNodeEarlyStopping, ObservationAggregator, Sum


@ranks(1, 2, 3, 4, on="threads")
@ranks(2, on=("mpi", "gloo"))
def test_the_mean_of_all_values_of_all_ranks(comm):
    aggregate = ObservationAggregator(comm, "loss")
    assert aggregate({"loss": float(comm.rank), "lr": 0.1}) == {"loss": (comm.size - 1) / 2, "lr": 0.1}
    got = aggregate({"loss": torch.tensor(float(comm.rank), requires_grad=True)})
    assert got == {"loss": (comm.size - 1) / 2}
    weighted = aggregate({"loss": (float(comm.rank), comm.rank + 1)})
    total = sum(range(1, comm.size + 1))
    assert weighted["loss"] == pytest.approx(sum(r * (r + 1) for r in range(comm.size)) / total)


@ranks(2, on="threads")
def test_values_are_collected_until_every_nth_call(comm):
    aggregate = ObservationAggregator(comm, "loss", "loss of all", every=3)
    before = comm.group.collectives
    assert aggregate({"loss": 1.0}) == {"loss": 1.0}
    saved = aggregate.state_dict()
    resumed = ObservationAggregator(comm, "loss", "loss of all", every=3)
    resumed.load_state_dict(saved)
    before = comm.group.collectives
    assert resumed({} if comm.rank else {"loss": 2.0}) == ({} if comm.rank else {"loss": 2.0})
    assert comm.group.collectives == before, "a call in between communicates"
    assert resumed({"loss": 6.0}) == {"loss": 6.0, "loss of all": (1 + 2 + 6 + 1 + 6) / 5}
    assert [resumed({}), resumed(None), resumed({"lr": 1})] == [{}, {}, {"lr": 1}], "no rank observed anything"


@ranks(3, on="threads")
def test_a_custom_aggregator_runs_once_with_the_values_of_all_ranks(comm):
    seen = []

    def largest(everyone):
        seen.append(everyone)
        return max(value for values in everyone for value in values)

    aggregate = ObservationAggregator(comm, "x", every=2, aggregator=largest)
    aggregate({"x": comm.rank})
    assert aggregate({"x": 10 * comm.rank}) == {"x": 20}
    assert seen == ([[[0, 0], [1, 10], [2, 20]]] if comm.rank == 0 else [])

    failing = ObservationAggregator(comm, "x", aggregator=lambda everyone: 1 / 0)
    assert_refused(comm, lambda: failing({"x": 1}), "ZeroDivisionError", "'x'", kind=torchmn.ArgumentError)


@ranks(2, on="threads")
def test_wrong_observations_and_settings_are_refused_on_every_rank(comm):
    aggregate = ObservationAggregator(comm, "loss")
    assert_refused(comm, lambda: aggregate({"loss": "low" if comm.rank else 1.0}), "rank 1", "expected a number")
    added = {"loss": Sum(1.0) if comm.rank else 1.0}
    assert_refused(comm, lambda: aggregate(added), "rank 1", "aggregator that adds up", kind=torchmn.ArgumentError)
    mixed = {"loss": (1.0, 3) if comm.rank else 1.0}
    assert_refused(comm, lambda: aggregate(mixed), "use pairs for all values or for none", kind=torchmn.ArgumentError)
    assert_refused(comm, lambda: ObservationAggregator(comm, "loss", every=0 if comm.rank else 1), "rank 1", "every")
    assert_refused(comm, lambda: ObservationAggregator(comm, f"{comm.rank}"), "key", kind=torchmn.MismatchError)


@ranks(1, 2, 3, on="threads")
@ranks(2, on="mpi")
def test_all_ranks_stop_at_the_same_check_on_the_mean_of_their_metrics(comm):
    # Each rank alone would stop elsewhere: on rank 0 the metric improves always, on the others never.
    stop = MultiNodeEarlyStopping(comm, "loss", patience=2)
    means = [5.0, 4.0, 4.5, 3.0, 3.1, 3.0, 1.0]
    decisions = []
    for check, mean in enumerate(means):
        tilt = -check if comm.rank == 0 else check / max(comm.size - 1, 1)
        decisions.append(stop({"loss": mean + (tilt if comm.size > 1 else 0), "other": comm.rank}))
        if decisions[-1]:
            break
    assert decisions == [False] * 5 + [True]
    assert (stop.best, stop.checks, stop.waited, stop.stopped) == (pytest.approx(3.0), 6, 2, True)


@ranks(2, on="threads")
def test_modes_minimal_improvement_and_the_last_check(comm):
    def checks(values, **options):
        stop = MultiNodeEarlyStopping(comm, patience=1, **options)
        return [stop(value) for value in values]

    assert checks([0.1, 0.2, 0.2], monitor="val/accuracy") == [False, False, True]
    assert checks([0.1, 0.2], monitor="val/accuracy", mode="min") == [False, True]
    assert checks([2.0, 1.0], monitor="score", mode="max") == [False, True]
    assert checks([1.0, 0.95, 0.9], min_delta=0.1) == [False, True, True]
    assert checks([3.0, 2.0, 1.0], max_checks=3) == [False, False, True]
    assert checks([float("nan"), 1.0]) == [True, False], "a nan is no improvement"
    assert checks([1.0, 9.0, 2.0, 9.0], every=2, max_checks=2) == [False, False, False, True]
    # Ranks without the metric do not count; means are weighted by numbers of samples.
    assert checks([5.0 if comm.rank else None, 5.0]) == [False, True]
    stop = MultiNodeEarlyStopping(comm)
    stop({"loss": (8.0, 1) if comm.rank else (2.0, 3)})
    assert stop.best == 3.5


@ranks(2, on="threads")
def test_a_resumed_run_stops_where_the_other_one_would_have(comm):
    values = [3.0, 2.0, 2.5, 2.5, 2.5]
    one = MultiNodeEarlyStopping(comm, patience=3)
    for value in values[:3]:
        one(value)
    state = one.state_dict()
    assert comm.allgather_obj(state) == [state] * 2
    other = MultiNodeEarlyStopping(comm, patience=3)
    other.load_state_dict(state)
    assert [other(value) for value in values[3:]] == [one(value) for value in values[3:]] == [False, True]


@ranks(2, on="threads")
def test_a_metric_that_no_rank_has_is_refused_on_every_rank(comm):
    stop = MultiNodeEarlyStopping(comm, "loss")
    assert_refused(comm, lambda: stop({"losses": 1.0}), "no rank has a metric 'loss'", "Did you mean 'losses'")
    assert_refused(comm, lambda: stop({"loss": "low" if comm.rank else 1.0}), "rank 1", "expected a number")
    for wrong, words in (({"mode": "mix"}, "'max'"), ({"patience": 0}, "patience"), ({"min_delta": -1}, "min_delta")):
        options = wrong if comm.rank else {}
        assert_refused(comm, lambda options=options: MultiNodeEarlyStopping(comm, **options), "rank 1", words)


@ranks(2, on="threads")
def test_values_that_have_no_common_mean_are_refused_on_every_rank(comm):
    for mine in (torch.ones(2 + comm.rank), torch.ones(2) if comm.rank else 1.0):
        aggregate = ObservationAggregator(comm, "loss")
        assert_refused(comm, lambda: aggregate({"loss": mine}), "expected values of the same shape")  # noqa: B023


@ranks(2, on="threads")
def test_early_stopping_needs_one_real_number(comm):
    for wrong in (torch.ones(2), torch.ones(1, dtype=torch.complex64), (np.ones(3), 5)):
        stop = MultiNodeEarlyStopping(comm)
        given = wrong if comm.rank == 1 else 1.0
        assert_refused(comm, lambda: stop({"loss": given}), "rank 1 of 2", "expected one real number")  # noqa: B023
    assert MultiNodeEarlyStopping(comm, patience=1)({"loss": np.array([1.0])}) is False


@ranks(1, 2, on="threads")
def test_a_grid_is_not_a_communicator(comm):
    grid = torchmn.ProcessGrid(comm, height=comm.size)
    with pytest.raises(torchmn.ArgumentError, match="expected comm to be a communicator, got <ProcessGrid"):
        MultiNodeEarlyStopping(grid)
    with pytest.raises(torchmn.ArgumentError, match=r"pass grid\.replicas, the ranks that evaluate different samples"):
        torchmn.create_multi_node_evaluator(dict, grid)
