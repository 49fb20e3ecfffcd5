"""The names of ChainerMN's `extensions`; they are those of torchmn.training, with ChainerMN's arguments.

There is no Trainer: call them in the loop, with the observations of a step or an epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.other_spellings import module_attribute, other_spellings
from torchmn.training import (
    AllreducePersistent,
    GenericMultiNodeEvaluator,
    MultiNodeEarlyStopping,
    create_multi_node_evaluator,
)
from torchmn.training import ObservationAggregator as Aggregator
from torchmn.training.checkpoint import create_multi_node_checkpointer

__all__ = [
    "AllreducePersistent",
    "GenericMultiNodeEvaluator",
    "MultiNodeEarlyStoppingTrigger",
    "ObservationAggregator",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
]

Trigger = tuple[int, str]
"""A number, and "iteration" or "epoch"."""


def _calls(name: str, trigger: Trigger, unit: str) -> int:
    """Returns the number of a trigger whose unit is that of the calls."""
    if trigger[1] != unit:
        raise ArgumentError(
            f"expected {name} to be a pair (number, {unit!r}), got {trigger!r}: there is no Trainer that counts "
            f"{trigger[1]}s; call this once per {unit}"
        )
    return trigger[0]


class TriggeredAggregator(Aggregator):
    """`torchmn.training.ObservationAggregator`, with ChainerMN's arguments; call it in every step.

    Args:
        comm: communicator whose ranks call it.
        original_key: the entry of the observation to combine.
        aggregated_key: the entry for the result; by default `original_key`.
        comm_trigger: (number of steps, "iteration") per combination.
        aggregator: computes the result from a list with one list of values per rank.
    """

    def __init__(
        self,
        comm: Communicator,
        original_key: str,
        aggregated_key: str | None = None,
        *,
        comm_trigger: Trigger = (1, "iteration"),
        aggregator: Callable[[list[list[Any]]], Any] | None = None,
    ):
        every = _calls("comm_trigger", comm_trigger, "iteration")
        super().__init__(comm, original_key, aggregated_key, every=every, aggregator=aggregator)


ObservationAggregator = TriggeredAggregator


class MultiNodeEarlyStoppingTrigger(MultiNodeEarlyStopping):
    """`torchmn.training.MultiNodeEarlyStopping`, with ChainerMN's arguments; call it with the metrics of an epoch.

    Args:
        comm: communicator whose ranks call it.
        check_trigger: (number, "epoch" or "iteration"): checks once in so many calls.
        monitor: the metric to monitor, by its mean over ranks.
        patience: number of successive checks without improvement after which to stop.
        mode: "min" or "max" is better; "auto" means "max" if `monitor` contains "accuracy", otherwise "min".
        max_trigger: (number, unit of `check_trigger`) of calls after which to stop in any case.
        patients: the same as `patience`.
    """

    @other_spellings
    def __init__(
        self,
        comm: Communicator,
        *,
        check_trigger: Trigger = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int | None = None,
        mode: str = "auto",
        max_trigger: Trigger = (100, "epoch"),
        patients: int | None = None,
    ):
        if patience is not None and patients is not None:
            raise TypeError("MultiNodeEarlyStoppingTrigger: expected patience or patients, got both")
        every, unit = check_trigger
        max_checks = max(1, _calls("max_trigger", max_trigger, unit) // every)
        waits = 3 if patience is None and patients is None else patience or patients
        super().__init__(comm, monitor, waits or 0, mode, max_checks=max_checks, every=every)


def __getattr__(name: str) -> Any:
    return module_attribute("extensions", name, ("multi_node_snapshot",))
