"""Objective: the loss that training minimises, a weighted sum of costs, each of some of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.experiment.file.registry import Options
from torchmn.experiment.vocabulary.costs import check_per_sample
from torchmn.experiment.vocabulary.scores import Outputs, Probabilities, ProbabilitySource
from torchmn.functions import allreduce

Values = TypeVar("Values", Tensor, np.ndarray)


def select_units(outputs: Values, units: tuple[int, int] | None) -> Values:
    """Returns the outputs of some units; None selects all.

    Args:
        outputs: (batch, units, ...).
        units: first unit, and the one after the last.
    """
    return outputs if units is None else outputs[:, units[0] : units[1]]


@dataclass(frozen=True)
class Term:
    """One cost.

    Attributes:
        name: for messages.
        function: called with outputs and targets; with the sum over replicas too if `of_batch`.
        target: "labels" or "inputs".
        units: the outputs that it reads; None for all.
        scale: its weight.
        of_batch: whether it depends on the whole batch, not on each sample alone.
        source: the layer that computes the probabilities of its units, if it is computed from these.
    """

    name: str
    function: Callable[..., Tensor]
    target: str
    units: tuple[int, int] | None
    scale: float
    of_batch: bool
    source: ProbabilitySource | None = None

    @staticmethod
    def of(cost: Options, activation: str, target: str, source: ProbabilitySource | None = None) -> Term:
        """Returns the term of a cost. A user's cost may lack the options of built-in ones."""
        return Term(
            f"{cost.where}: {cost.kind}",
            cost.build(activation),
            getattr(cost, "target", None) or target,
            getattr(cost, "units", None),
            getattr(cost, "scale", 1.0),
            getattr(cost, "of_batch", False),
            source,
        )

    def select(self, outputs: Outputs) -> Tensor | Probabilities:
        """Returns the part of the outputs that `function` takes."""
        if self.source is not None:
            return self.source.probabilities(outputs.scores)
        return select_units(outputs.values, self.units)


@dataclass(frozen=True)
class Objective:
    """A sum of costs. `replicas` are the ranks among which a batch is divided."""

    terms: Sequence[Term]
    replicas: Communicator

    def needs(self, target: str) -> bool:
        """Returns whether a term uses this target."""
        return any(term.target == target for term in self.terms)

    @property
    def class_units(self) -> tuple[int, int] | None:
        """The units of the first term with labels, which are the outputs for classes; None for all units."""
        return next((term.units for term in self.terms if term.target == "labels" and not term.of_batch), None)

    def losses(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss of each of this rank's samples. All replicas must call it.

        Args:
            outputs: of the model, for this rank's samples.
            targets: by their names, "labels" and "inputs", as far as terms need them.
        """
        total: Tensor | None = None
        for term in self.terms:
            extra = (self._sum,) if term.of_batch else ()
            values = term.function(term.select(outputs), targets[term.target], *extra)
            check_per_sample(values, outputs.values, term.name)
            values = values if term.scale == 1.0 else values * term.scale
            total = values if total is None else total + values
        assert total is not None
        return total

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.replicas.size == 1 else allreduce(self.replicas, x)
