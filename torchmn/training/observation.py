"""ObservationAggregator: a value that every rank observes becomes one value of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.training import metrics


def decided_on_rank_0(
    comm: Communicator, operation: str, local: Any, decide: Callable[[list[Any]], Any], problem: str | None = None
) -> Any:
    """What `decide` makes of all ranks' `local`, computed once, on rank 0, and sent to all.

    Computing it on every rank could give answers that differ in the last digit, and ranks that part ways. What
    `decide` raises on rank 0 is an `ArgumentError` on every rank, and so is a `problem` with this rank's `local`.
    """
    comm.agree(operation, problem)
    everyone = comm.gather_obj(local, 0)
    return comm.attempt(operation, lambda: decide(everyone or []), root=0)[0]


class ObservationAggregator:
    """Collects one entry of the observations of all ranks; called in every step, on every rank.

        loss_of_all = ObservationAggregator(comm, "loss", every=10)
        for batch in loader:
            observation = loss_of_all({"loss": (loss.item(), len(batch))})   # or only loss.item()

    In every `every`-th call the values that all ranks observed since the last time are joined, and the call returns
    the observation with the result under `aggregated_key` (by default `key` itself). In other calls it returns the
    observation as it is. A rank may lack the entry; if all of them did, the result lacks it too.

    aggregator: makes the result from a list with one list of values per rank, in rank order. It runs on rank 0
        alone, so that all ranks get the same, bit by bit. By default: the mean of all values of all ranks. A value
        may be a pair (mean, number of samples), and is then weighted by its number.
    """

    def __init__(
        self,
        comm: Communicator,
        key: str,
        aggregated_key: str | None = None,
        *,
        every: int = 1,
        aggregator: Callable[[list[list[Any]]], Any] | None = None,
    ):
        self.comm, self.key, self.aggregated_key = comm, key, aggregated_key or key
        self.every, self.aggregator = every, aggregator or mean_of_all
        problem = None
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            problem = f"expected every to be a number of calls >= 1, got {every!r}"
        same = {"key": key, "aggregated_key": self.aggregated_key, "every": every}
        comm.agree("ObservationAggregator", problem, **same)
        self._calls = 0
        self._observed: list[Any] = []

    def __call__(self, observation: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The observation, with the aggregated value in every `every`-th call; collective in these."""
        result, problem = dict(observation or {}), None
        operation = f"ObservationAggregator({self.key!r})"
        if result.get(self.key) is not None:
            value, problem = plain(result[self.key])
            self._observed.append(value)
        self._calls += 1
        if self._calls % self.every:
            if problem:
                raise ArgumentError(f"rank {self.comm.rank} of {self.comm.size}: {operation}: {problem}")
            return result
        observed, self._observed = self._observed, []
        result.pop(self.aggregated_key, None)
        found, value = decided_on_rank_0(self.comm, operation, observed, self._aggregate, problem)
        return {**result, self.aggregated_key: value} if found else result

    def _aggregate(self, everyone: list[list[Any]]) -> tuple[bool, Any]:
        return (True, self.aggregator(everyone)) if any(everyone) else (False, None)

    def state_dict(self) -> dict[str, Any]:
        """What is collected and not yet joined on this rank."""
        return {"calls": self._calls, "observed": list(self._observed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._calls, self._observed = state["calls"], list(state["observed"])


def plain(value: Any) -> tuple[Any, str | None]:
    """`value` ready to travel, its tensors without graph and off the GPU; and the problem with it, or None."""
    metric, problem = metrics.read_one(value, None)
    if metric is None:
        return None, problem
    if metric.is_sum:
        return None, "expected a value to take the mean of, got a torchmn.training.Sum: pass an aggregator that adds up"
    return (metric.value if metric.samples is None else (metric.value, metric.samples)), None


def mean_of_all(everyone: list[list[Any]]) -> Any:
    """The mean of all ranks' values, weighted where they are pairs (mean, number of samples)."""
    read = [metrics.read_one(value, None)[0] for values in everyone for value in values]
    observed = [metric for metric in read if metric is not None and metric.samples != 0]
    weighted = {metric.samples is not None for metric in observed}
    if len(weighted) > 1:
        raise ArgumentError("some values are pairs (mean, number of samples) and others are not: weigh all or none")
    if not observed:
        return float("nan")
    kinds = sorted({metric.kind[1] for metric in observed})
    if len(kinds) > 1:
        raise ArgumentError(f"expected values of one shape, got {' and '.join(kinds)}")
    weights = [1.0 if metric.samples is None else float(metric.samples) for metric in observed]
    return metrics.weighted_mean([metric.value for metric in observed], weights)
