"""Ranks whose next step would be another one: another learning rate, or a model in another mode."""

from __future__ import annotations

from typing import Any

from torchmn.optim.checks import hyperparameters
from torchmn.optim.events import Optimizing, StepGuard, guard
from torchmn.optim.gradients import Gradient


@guard(on="step", why="a schedule that one rank alone has stepped lets its parameters drift apart from the others'")
class Hyperparameters(StepGuard):
    """Compares what the optimizer was made with, or a schedule has set since."""

    def same(self, grads: list[Gradient]) -> dict[str, Any]:
        return {"hyperparameters": hyperparameters(self.seen.actual)}


@guard(on="step", why="a rank in eval mode computes its gradients without dropout and with running statistics")
class Mode(StepGuard):
    """Compares the mode of the model, where it is known, and of its modules."""

    def __init__(self, seen: Optimizing):
        super().__init__(seen)
        self._named_modules = [] if seen.model is None else list(seen.model.named_modules())

    def same(self, grads: list[Gradient]) -> dict[str, Any]:
        model = self.seen.model
        if model is None:
            return {}
        training = model.training
        others = [name for name, module in self._named_modules if module.training != training]
        return {"mode of the model": "train" if training else "eval", "modules in the other mode": tuple(others)}
