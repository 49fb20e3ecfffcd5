"""CombinedOptimizer: several optimizers as one, for a model whose layers have different ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchmn.errors import ArgumentError
from torchmn.optim.wrapper import StepLock


class CombinedOptimizer(Optimizer):
    """Several torch optimizers as one: its groups and its state are theirs, and a step is one of each.

    Args:
        optimizers: each of other parameters. They must not be used any more.
    """

    def __init__(self, optimizers: Sequence[Optimizer]):
        self._parts = tuple(optimizers)
        # Guards of parallel models accept a step of a part only if it has a lock, as parts of a wrapped optimizer.
        self._locks = tuple(StepLock() for _ in self._parts)
        self._complete = False
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._complete = True
        for part, lock in zip(self._parts, self._locks, strict=True):
            part.register_step_pre_hook(lock)
            self.state.update(part.state)
        self._share_state()

    @property
    def parts(self) -> tuple[Optimizer, ...]:
        """The optimizers."""
        return self._parts

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, lock in zip(self._parts, self._locks, strict=True):
            lock.open = True
            try:
                part.step()
            finally:
                lock.open = False
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._complete:
            raise ArgumentError(
                f"add_param_group: which of {', '.join(type(part).__name__ for part in self._parts)} would step these "
                "parameters? Make a CombinedOptimizer with all parameters"
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of load_state_dict
        super().__setstate__(state)
        self._share_state()

    def __getstate__(self) -> dict[str, Any]:
        raise ArgumentError("a CombinedOptimizer cannot be copied or pickled: save its state_dict()")

    def _share_state(self) -> None:
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.__setstate__({"state": self.state, "param_groups": self.param_groups[first:last]})
            first = last
