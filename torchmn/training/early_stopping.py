"""`MultiNodeEarlyStopping`: early stopping at the same check on all ranks, decided by rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any

from torch import Tensor

from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.errors import ArgumentError, nearest
from torchmn.training.observation import decided_on_rank_0, mean_of_all, plain

MODES = ("auto", "max", "min")


class MultiNodeEarlyStopping:
    """Returns True, on every rank at the same check, when the monitored metric has stopped improving.

    Example::

        stop = MultiNodeEarlyStopping(comm, monitor="loss", patience=3)
        for epoch in range(100):
            ...
            if stop(evaluate(model, loader)):
                break

    Args:
        comm: communicator whose ranks call it.
        monitor: the metric to monitor, by its mean over ranks; pairs (mean, number of samples) are weighted. Some ranks
            may lack it, or pass None.
        patience: number of successive checks without improvement after which to stop.
        mode: "min" or "max" is better; "auto" means "max" if `monitor` contains "accuracy", otherwise "min".
        min_delta: an improvement by this or less does not count; neither does nan.
        max_checks: stop at this check in any case.
        every: only every `every`-th call is a check; others return False without communication.

    Attributes:
        best: the best value so far, or None.
        checks: number of checks.
        waited: number of checks since the last improvement.
        stopped: the result of the last check.

    Raises:
        ArgumentError: on every rank, for a wrong argument; when called, if no rank has the metric.
        MismatchError: on every rank, if arguments differ between ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        monitor: str = "loss",
        patience: int = 3,
        mode: str = "auto",
        *,
        min_delta: float = 0.0,
        max_checks: int | None = None,
        every: int = 1,
    ):
        comm = as_communicator(comm, type(self).__name__)
        problem = None if isinstance(monitor, str) else f"expected monitor to be the name of a metric, got {monitor!r}"
        if mode not in MODES:
            problem = f"expected mode to be 'auto', 'min' or 'max', got {mode!r}. {nearest(mode, MODES)}"
        for name, value, least in (("patience", patience, 1), ("max_checks", max_checks, 1), ("every", every, 1)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                problem = f"expected {name} to be an int >= {least}, got {value!r}"
        if not isinstance(min_delta, int | float) or not min_delta >= 0:
            problem = f"expected min_delta to be a number >= 0, got {min_delta!r}"
        options = {"patience": patience, "mode": mode, "min_delta": min_delta, "max_checks": max_checks, "every": every}
        comm.agree(type(self).__name__, problem, monitor=monitor, **options)
        self.comm, self.monitor, self.patience, self.min_delta = comm, monitor, patience, min_delta
        self.max_checks, self.every = max_checks, every
        self.mode = ("max" if "accuracy" in monitor else "min") if mode == "auto" else mode
        self.best: float | None = None
        self.checks = 0
        self.waited = 0
        self.stopped = False
        self._calls = 0

    def __call__(self, metrics: Mapping[str, Any] | float | None = None) -> bool:
        """Returns whether to stop; `metrics` may also be the monitored value itself."""
        self._calls += 1
        if self._calls % self.every:
            return False
        by_name = metrics if isinstance(metrics, Mapping) else {self.monitor: metrics}
        value, problem = by_name.get(self.monitor), None
        if value is not None:
            value, problem = plain(value)
            problem = problem or _number_problem(value[0] if isinstance(value, tuple) else value)
        local = (value, sorted(map(str, by_name)))
        operation = f"{type(self).__name__}({self.monitor!r})"
        self.best, self.waited, self.stopped = decided_on_rank_0(self.comm, operation, local, self._decide, problem)
        self.checks += 1
        return self.stopped

    def _decide(self, ranks: list[tuple[Any, list[str]]]) -> tuple[float | None, int, bool]:
        """Returns (best, waited, stop) after this check."""
        values = [value for value, _ in ranks if value is not None]
        if not values:
            keys = sorted({key for _, keys in ranks for key in keys} - {self.monitor})
            raise ArgumentError(f"no rank has a metric {self.monitor!r}. {nearest(self.monitor, keys) if keys else ''}")
        now = float(mean_of_all([values]))
        better = not isnan(now) and (self.best is None or self._gain(now, self.best) > self.min_delta)
        best, waited = (now, 0) if better else (self.best, self.waited + 1)
        last = self.max_checks is not None and self.checks + 1 >= self.max_checks
        return best, waited, last or waited >= self.patience

    def _gain(self, now: float, best: float) -> float:
        return now - best if self.mode == "max" else best - now

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, the same on all ranks, with which a resumed run stops at the same check."""
        names = ("best", "checks", "waited", "stopped")
        return {name: getattr(self, name) for name in names} | {"calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self.best, self.checks, self.waited, self.stopped, self._calls = (
            state[name] for name in ("best", "checks", "waited", "stopped", "calls")
        )


def _number_problem(value: Any) -> str | None:
    """Returns why `value` cannot be compared, or None."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        return f"expected one real number, got a tensor of shape {tuple(value.shape)}, {value.dtype}"
    return None
