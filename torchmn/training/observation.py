"""`ObservationAggregator`: combines a value of a training loop, such as the loss, over ranks and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.training import combined_metrics


def decided_on_rank_0(
    comm: Communicator, operation: str, local: Any, decide: Callable[[list[Any]], Any], problem: str | None = None
) -> Any:
    """Returns `decide([local of rank 0, local of rank 1, ...])`, computed on rank 0 and sent to all ranks.

    Results computed on every rank could differ in the last digit, and ranks would then take different branches.

    Args:
        comm: communicator whose ranks all call.
        operation: its name, in messages.
        local: this rank's value, an object that pickles.
        decide: computes the result on rank 0.
        problem: why this rank has no valid `local`, or None.

    Returns:
        The result, the same on all ranks.

    Raises:
        ArgumentError: on every rank, if a rank has a `problem` or `decide` raised.
    """
    comm.agree(operation, problem)
    ranks = comm.gather_obj(local, 0)
    return comm.attempt(operation, lambda: decide(ranks or []), root=0)[0]


class ObservationAggregator:
    """Combines one entry of the observations of all ranks; call it in every step, on every rank.

    Example::

        loss_of_all = ObservationAggregator(comm, "loss", every=10)
        for batch in loader:
            observation = loss_of_all({"loss": (loss.item(), len(batch))})   # or only loss.item()

    Every `every`-th call combines the values of all ranks since the previous combination, and returns the observation
    with the result under `aggregated_key`. Other calls return the observation unchanged. A rank may lack the entry; if
    all ranks lack it, so does the result.

    Args:
        comm: communicator whose ranks call it.
        key: the entry of the observation to combine.
        aggregated_key: the entry for the result; by default `key`.
        every: number of calls per combination.
        aggregator: computes the result from a list with one list of values per rank, in rank order. It runs on rank 0
            only, so that the result is bit for bit the same on all ranks. By default the mean of all values; a value
            may be a pair (mean, number of samples), and is then weighted by its number.

    Raises:
        ArgumentError: on every rank, for a wrong argument; when called, for a value that is not a number or tensor.
        MismatchError: on every rank, if arguments differ between ranks.
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
        """Returns the observation; every `every`-th call is collective and adds the combined value."""
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

    def _aggregate(self, ranks: list[list[Any]]) -> tuple[bool, Any]:
        return (True, self.aggregator(ranks)) if any(ranks) else (False, None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the values of this rank that are not combined yet."""
        return {"calls": self._calls, "observed": list(self._observed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self._calls, self._observed = state["calls"], list(state["observed"])


def plain(value: Any) -> tuple[Any, str | None]:
    """Returns `value` with tensors detached and on the CPU, to be sent; and the problem with it, or None."""
    metric, problem = combined_metrics.read_one(value, None)
    if metric is None:
        return None, problem
    if metric.is_sum:
        return None, "expected a value to take the mean of, got a torchmn.training.Sum: pass an aggregator that adds up"
    return (metric.value if metric.samples is None else (metric.value, metric.samples)), None


def mean_of_all(ranks: list[list[Any]]) -> Any:
    """Returns the mean of all ranks' values, weighted if they are pairs (mean, number of samples)."""
    read = [combined_metrics.read_one(value, None)[0] for values in ranks for value in values]
    observed = [metric for metric in read if metric is not None and metric.samples != 0]
    weighted = {metric.samples is not None for metric in observed}
    if len(weighted) > 1:
        raise ArgumentError(
            "some values are pairs (mean, number of samples) and others are not: use pairs for all values or for none"
        )
    if not observed:
        return float("nan")
    kinds = sorted({metric.kind[1] for metric in observed})
    if len(kinds) > 1:
        raise ArgumentError(f"expected values of the same shape, got {' and '.join(kinds)}")
    weights = [1.0 if metric.samples is None else float(metric.samples) for metric in observed]
    return combined_metrics.weighted_mean([metric.value for metric in observed], weights)
