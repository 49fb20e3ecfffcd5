"""Synchronizes metrics of torchmetrics over the ranks of a communicator, without importing torchmetrics.

torchmetrics itself synchronizes ranks only through the default process group of torch.distributed, which TorchMN's
communicators do not create: `metric.compute()` would return the value of one rank's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.errors import ArgumentError, MismatchError


def torchmetrics_sync(comm: Communicator) -> dict[str, Any]:
    """Returns keyword arguments for a metric of torchmetrics, with which it computes its value from all ranks' data.

    Example::

        accuracy = torchmetrics.classification.MulticlassAccuracy(10, **torchmn.training.torchmetrics_sync(comm))
        for x, t in loader:                 # this rank's part, of any length
            accuracy.update(model(x), t)
        accuracy.compute()                  # the same on every rank; all ranks must call

    Args:
        comm: communicator whose ranks update the metric; all of them must compute the same metrics, in the same order.

    Returns:
        The keyword arguments `dist_sync_fn` and `distributed_available_fn`.

    Raises:
        ArgumentError: if `comm` is not a communicator.
    """
    hook = _hook(comm, "torchmetrics_sync")
    return {"dist_sync_fn": hook, "distributed_available_fn": hook.is_needed}


def synchronize_torchmetrics(metrics: Any, comm: Communicator) -> Any:
    """Makes existing metrics compute their values from all ranks' data, as `torchmetrics_sync` does for new ones.

    Args:
        metrics: a metric, a `MetricCollection`, or a module that contains some.
        comm: communicator whose ranks update them.

    Returns:
        `metrics` itself.

    Raises:
        ArgumentError: if `metrics` contains no metric of torchmetrics, or `comm` is not a communicator.
    """
    hook = _hook(comm, "synchronize_torchmetrics")
    found = _parts(metrics) if isinstance(metrics, nn.Module) else []
    if not found:
        raise ArgumentError(
            f"synchronize_torchmetrics: expected a metric of torchmetrics, a collection of them or a module "
            f"with some, got {describe(metrics)}"
        )
    for metric in found:
        metric.dist_sync_fn, metric.distributed_available_fn = hook, hook.is_needed
    return metrics


def is_torchmetrics(value: object) -> bool:
    """Returns whether `value` is a metric, or a collection of metrics, of torchmetrics."""
    kinds = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    return isinstance(value, nn.Module) and "torchmetrics" in kinds and callable(getattr(value, "compute", None))


@dataclass
class MetricCopy:
    """A copy of one rank's metric on the CPU, to be sent."""

    metric: Any

    @staticmethod
    def of(metric: Any) -> MetricCopy:
        return MetricCopy(metric.clone().cpu())


def compute_from_all(copies: Sequence[MetricCopy]) -> Any:
    """Returns the result of `compute` for the data of all ranks, without communication.

    torchmetrics reduces the states: the hook that it calls to gather them returns those of `copies`.

    Args:
        copies: of the ranks that have the metric, in rank order.

    Returns:
        What `compute` returns.
    """
    metrics, states = [each.metric for each in copies], {}
    for metric in metrics:
        if hasattr(metric, "items"):
            metric.items(copy_state=False)  # metrics of a collection may share states: this sets them on each
    updated = (metric for metric in metrics if any(part.update_called for part in _parts(metric)))
    whole = next(updated, metrics[0])
    for metric, *ranks in zip(_parts(whole), *map(_parts, metrics), strict=True):
        for name, state in metric.metric_state.items():
            rank_states = [getattr(each, name) for each in ranks]
            if isinstance(state, list):  # lengths may differ between ranks
                setattr(metric, name, [element for elements in rank_states for element in elements])
            else:
                states[id(state)] = rank_states
        metric.dist_sync_fn = lambda x, group=None: states.get(id(x), [x])
        metric.distributed_available_fn = lambda: True
        # The cached value of one rank's data: torchmetrics has no public method that clears the cache alone.
        metric._computed = None
    return _plain(whole.compute())


class _Hook:
    """Gathers the states of metrics from all ranks. An unpickled copy has no communicator and gathers nothing."""

    def __init__(self, comm: Communicator | None):
        self.comm = comm

    def is_needed(self) -> bool:
        return self.comm is not None and self.comm.size > 1

    def __call__(self, x: Tensor, group: Any = None) -> list[Tensor]:
        """Returns the states of all ranks, in rank order."""
        comm = self.comm
        if comm is None:
            return [x]
        states: list[Tensor] = comm.allgather_obj(x.detach().cpu())
        # On a rank without data, torchmetrics replaces a list of states by an empty 1-d tensor.
        filled = [state for state in states if state.numel() or state.dim() != 1]
        kinds = sorted({f"{state.dtype}, {state.dim()} dims" for state in filled})
        if len(kinds) > 1:
            raise MismatchError(
                f"rank {comm.rank} of {comm.size}: torchmetrics: ranks gather states of different kinds: "
                f"{'; '.join(kinds)}. Compute the same metrics in the same order on every rank. A metric that keeps a "
                "list of its updates needs equally many on every rank; or return the metric itself from an evaluator "
                "of create_multi_node_evaluator, which requires neither"
            )
        if filled:
            empty = filled[0].new_empty((0, *filled[0].shape[1:]))
            states = [state if state.numel() or state.dim() != 1 else empty for state in states]
        return [state.to(x.device) for state in states]

    def __deepcopy__(self, _: Any) -> _Hook:
        return self  # a clone of a metric has the same communicator

    def __reduce__(self) -> Any:
        return _Hook, (None,)


def _hook(comm: Any, name: str) -> _Hook:
    comm = as_communicator(comm, name)
    return _Hook(comm)


def _parts(metric: nn.Module) -> list[Any]:
    """Returns the metrics in a metric, a collection or a module; without collections, which have no states."""
    return [part for part in metric.modules() if is_torchmetrics(part) and hasattr(part, "update_called")]


def _plain(value: Any) -> Any:
    """Returns `value` with 0-d tensors replaced by numbers."""
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 else value
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value
