"""Guards against ranks with different hyperparameters, or with models in different modes."""

from __future__ import annotations

from typing import Any

from torchmn.optim.checks import hyperparameters
from torchmn.optim.events import StepGuard, WatchedOptimizer, guard
from torchmn.optim.gradients import Gradient


@guard(on="step", why="a learning-rate schedule that was stepped on one rank only makes its parameters diverge")
class Hyperparameters(StepGuard):
    """Compares the hyperparameters of ranks."""

    def same(self, grads: list[Gradient]) -> dict[str, Any]:
        return {"hyperparameters": hyperparameters(self.watched.actual)}


@guard(on="step", why="a rank in eval mode computes its gradients without dropout and with running statistics")
class TrainingMode(StepGuard):
    """Compares the train or eval mode of the model, if the optimizer was created with one, and of its modules."""

    def __init__(self, watched: WatchedOptimizer):
        super().__init__(watched)
        self._named_modules = [] if watched.model is None else list(watched.model.named_modules())

    def same(self, grads: list[Gradient]) -> dict[str, Any]:
        model = self.watched.model
        if model is None:
            return {}
        training = model.training
        others = [name for name, module in self._named_modules if module.training != training]
        return {"mode of the model": "train" if training else "eval", "modules in the other mode": tuple(others)}
