"""Ranks whose next step would be another one: another learning rate, or a model in another mode."""

from __future__ import annotations

from typing import Any

from torchmn.optim.checks import hyperparameters
from torchmn.optim.events import StepGuard, guard
from torchmn.optim.gradients import Gradient


@guard(on="step", why="a schedule that one rank alone has stepped lets its parameters drift apart from the others'")
class Hyperparameters(StepGuard):
    """Compares what the optimizer was made with, or a schedule has set since."""

    def same(self, grads: list[Gradient]) -> dict[str, Any]:
        return {"hyperparameters": hyperparameters(self.seen.actual)}


@guard(on="step", why="a rank in eval mode computes its gradients without dropout and with running statistics")
class Mode(StepGuard):
    """Compares whether the model, where it is known, drops out and normalises as in training."""

    def same(self, grads: list[Gradient]) -> dict[str, Any]:
        model = self.seen.model
        return {"mode of the model": None if model is None else "train" if model.training else "eval"}
