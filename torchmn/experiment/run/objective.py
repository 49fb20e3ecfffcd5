"""What a training makes smaller: one cost, or several, each of some of the outputs, weighted and summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.experiment.file.registry import Options
from torchmn.experiment.vocabulary.costs import check_per_sample
from torchmn.experiment.vocabulary.scores import Outputs, Probabilities, Source
from torchmn.functions import allreduce


def chosen(outputs: Any, units: tuple[int, int] | None) -> Any:
    """The outputs of these units, or all. outputs: (batch, units, ...), a tensor or an array"""
    return outputs if units is None else outputs[:, units[0] : units[1]]


@dataclass(frozen=True)
class Term:
    """One cost: `function` of some units and of a target, by its name.

    source: where the probabilities of its units come from, if it is computed from these
    """

    name: str  # for messages
    function: Callable[..., Tensor]
    target: str
    units: tuple[int, int] | None
    scale: float
    of_batch: bool
    source: Source | None = None

    @staticmethod
    def of(cost: Options, activation: str, target: str, source: Source | None = None) -> Term:
        """A user's own cost may have none of the options that ours have."""
        return Term(
            f"{cost.where}: {cost.kind}",
            cost.build(activation),
            getattr(cost, "target", None) or target,
            getattr(cost, "units", None),
            getattr(cost, "scale", 1.0),
            getattr(cost, "of_batch", False),
            source,
        )

    def seen(self, outputs: Outputs) -> Tensor | Probabilities:
        """What `function` is given of the outputs."""
        if self.source is not None:
            return self.source.probabilities(outputs.scores)
        return chosen(outputs.values, self.units)


@dataclass(frozen=True)
class Objective:
    """The sum of its terms. `replicas` are the ranks that share a batch."""

    terms: Sequence[Term]
    replicas: Communicator

    def needs(self, target: str) -> bool:
        """Whether a term is compared with this target."""
        return any(term.target == target for term in self.terms)

    @property
    def class_units(self) -> tuple[int, int] | None:
        """The outputs that stand for classes: those that the first term with labels is of."""
        return next((term.units for term in self.terms if term.target == "labels" and not term.of_batch), None)

    def losses(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> Tensor:
        """One loss per sample of this rank; every rank that shares the batch must call it."""
        total: Tensor | None = None
        for term in self.terms:
            more = (self._sum,) if term.of_batch else ()
            values = term.function(term.seen(outputs), targets[term.target], *more)
            check_per_sample(values, outputs.values, term.name)
            values = values if term.scale == 1.0 else values * term.scale
            total = values if total is None else total + values
        assert total is not None
        return total

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.replicas.size == 1 else allreduce(self.replicas, x)
