"""Metrics of torchmetrics over the ranks of a communicator. torchmetrics itself is not needed, nor imported.

By itself torchmetrics joins ranks only where torch.distributed has a default process group, which no communicator of
ours makes: `metric.compute()` would give the value of one rank's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError, MismatchError


def torchmetrics_sync(comm: Communicator) -> dict[str, Any]:
    """Returns the keywords with which a metric of torchmetrics computes its value from all ranks' data.

        accuracy = torchmetrics.classification.MulticlassAccuracy(10, **torchmn.training.torchmetrics_sync(comm))
        for x, t in loader:                 # this rank's part, of any length
            accuracy.update(model(x), t)
        accuracy.compute()                  # the same on every rank; every rank calls it

    Args:
        comm: communicator whose ranks update the metric; all of them compute it, in the same order of metrics.
    """
    hook = _hook(comm, "torchmetrics_sync")
    return {"dist_sync_fn": hook, "distributed_available_fn": hook.is_needed}


def synchronize_torchmetrics(metrics: Any, comm: Communicator) -> Any:
    """Makes metrics that exist compute their values from all ranks' data, as `torchmetrics_sync` does for new ones.

    Args:
        metrics: a metric, a `MetricCollection`, or a module that holds some.
        comm: communicator whose ranks update them.

    Returns:
        `metrics` itself.

    Raises:
        ArgumentError: if there is no metric of torchmetrics in it.
    """
    hook = _hook(comm, "synchronize_torchmetrics")
    found = _parts(metrics) if isinstance(metrics, nn.Module) else []
    if not found:
        raise ArgumentError(
            f"synchronize_torchmetrics: expected a metric of torchmetrics, a collection of them or a module that holds "
            f"some, got {describe(metrics)}"
        )
    for metric in found:
        metric.dist_sync_fn, metric.distributed_available_fn = hook, hook.is_needed
    return metrics


def is_torchmetrics(value: object) -> bool:
    """Whether `value` is a metric, or a collection of metrics, of torchmetrics."""
    kinds = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    return isinstance(value, nn.Module) and "torchmetrics" in kinds and callable(getattr(value, "compute", None))


@dataclass
class CarriedMetric:
    """A copy of one rank's metric, that travels."""

    metric: Any

    @staticmethod
    def of(metric: Any) -> CarriedMetric:
        return CarriedMetric(metric.clone().cpu())


def value_of_all(carried: Sequence[CarriedMetric]) -> Any:
    """What a metric's `compute` gives for the data of all ranks that have it, in rank order; no rank waits for another.

    torchmetrics reduces the states itself: it is given those of all ranks, as if it had gathered them.
    """
    metrics, states = [one.metric for one in carried], {}
    for metric in metrics:
        if hasattr(metric, "items"):
            metric.items(copy_state=False)  # metrics of a collection that share their states have them now
    updated = (metric for metric in metrics if any(part.update_called for part in _parts(metric)))
    whole = next(updated, metrics[0])
    for metric, *everyone in zip(_parts(whole), *map(_parts, metrics), strict=True):
        for name, state in metric.metric_state.items():
            theirs = [getattr(each, name) for each in everyone]
            if isinstance(state, list):  # of any length on each rank
                setattr(metric, name, [element for elements in theirs for element in elements])
            else:
                states[id(state)] = theirs
        metric.dist_sync_fn = lambda x, group=None: states.get(id(x), [x])
        metric.distributed_available_fn = lambda: True
        # The value of one rank's data, if it was asked for: torchmetrics has no public way to drop it alone.
        metric._computed = None
    return _plain(whole.compute())


class _Hook:
    """Gathers the states of metrics. A copy that is pickled belongs to no ranks and gathers nothing."""

    def __init__(self, comm: Communicator | None):
        self.comm = comm

    def is_needed(self) -> bool:
        return self.comm is not None and self.comm.size > 1

    def __call__(self, x: Tensor, group: Any = None) -> list[Tensor]:
        """All ranks' states, in rank order."""
        comm = self.comm
        if comm is None:
            return [x]
        everyone: list[Tensor] = comm.allgather_obj(x.detach().cpu())
        # A rank that has seen no data has an empty tensor of torchmetrics' choice in place of a list of states.
        real = [state for state in everyone if state.numel() or state.dim() != 1]
        kinds = sorted({f"{state.dtype}, {state.dim()} dims" for state in real})
        if len(kinds) > 1:
            raise MismatchError(
                f"rank {comm.rank} of {comm.size}: torchmetrics: ranks gather states of different kinds: "
                f"{'; '.join(kinds)}. Compute the same metrics in the same order on every rank. One that keeps its "
                "updates one by one needs equally many on every rank; or return the metric itself from an evaluator of "
                "create_multi_node_evaluator, which needs neither"
            )
        if real:
            empty = real[0].new_empty((0, *real[0].shape[1:]))
            everyone = [state if state.numel() or state.dim() != 1 else empty for state in everyone]
        return [state.to(x.device) for state in everyone]

    def __deepcopy__(self, _: Any) -> _Hook:
        return self  # a clone of a metric belongs to the same ranks

    def __reduce__(self) -> Any:
        return _Hook, (None,)


def _hook(comm: Any, name: str) -> _Hook:
    if not isinstance(comm, Communicator):
        raise ArgumentError(f"{name}: expected comm to be a communicator, got {describe(comm)}")
    return _Hook(comm)


def _parts(metric: nn.Module) -> list[Any]:
    """The metrics that a metric, a collection or a module is made of; a collection has no states of its own."""
    return [part for part in metric.modules() if is_torchmetrics(part) and hasattr(part, "update_called")]


def _plain(value: Any) -> Any:
    """A value with numbers in place of tensors of no dims."""
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 else value
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value
