"""WrappedOptimizer: an optimizer that forwards groups, state and hooks to another optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from torchmn._torch_compat import step_pre_hooks
from torchmn.errors import ArgumentError
from torchmn.optim import fused
from torchmn.other_spellings import advice_for


class WrappedOptimizer(Optimizer):
    """A torch optimizer whose groups, state, learning rates and hooks are those of `actual_optimizer`."""

    def __init__(self, actual_optimizer: Optimizer):
        # Optimizer.__init__ is not called: it would create param_groups.
        self.actual_optimizer = actual_optimizer
        lock = step_lock_of(actual_optimizer)  # it may have been wrapped before
        if lock is None:
            lock = StepLock()
            actual_optimizer.register_step_pre_hook(lock)
        self._lock = lock

    def _update(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs a step of the wrapped optimizer."""
        self._lock.open = True
        try:
            return fused.update(self.actual_optimizer, closure)
        finally:
            self._lock.open = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.actual_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.actual_optimizer.param_groups = value

    @property
    def state(self) -> Any:
        return self.actual_optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.actual_optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.actual_optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.actual_optimizer.defaults = value

    def __getattr__(self, name: str) -> Any:
        # Only called for attributes that this object does not have.
        if name == "actual_optimizer":
            raise AttributeError(name)
        try:
            return getattr(self.actual_optimizer, name)
        except AttributeError:
            instead = advice_for(f"MultiNodeOptimizer.{name}")
            if instead is None:
                raise
        raise AttributeError(f"a multi-node optimizer has no {name!r}; instead: {instead}", name=name, obj=self)

    def __getstate__(self) -> dict[str, Any]:
        raise ArgumentError(
            f"a {type(self).__name__} cannot be copied or pickled, because its communicator belongs to this process: "
            "save its state_dict(), or wrap a copy of its .actual_optimizer"
        )

    def state_dict(self) -> dict[str, Any]:
        return self.actual_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.actual_optimizer.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Callable) -> Any:
        return self.actual_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable) -> Any:
        return self.actual_optimizer.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Callable, prepend: bool = False) -> Any:
        return self.actual_optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Callable, prepend: bool = False) -> Any:
        return self.actual_optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Callable, prepend: bool = False) -> Any:
        return self.actual_optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Callable, prepend: bool = False) -> Any:
        return self.actual_optimizer.register_load_state_dict_post_hook(hook, prepend)


class StepLock:
    """A step hook of a wrapped optimizer that raises unless the multi-node optimizer called `step`."""

    reads_gradients_only = True  # see optim/fused.py

    def __init__(self) -> None:
        self.open = False

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.open:
            name = type(optimizer).__name__
            raise ArgumentError(
                f"step of the {name} that a multi-node optimizer has wrapped: it would use only this rank's gradients, "
                "and the parameters of ranks would diverge. Call step() of what create_multi_node_optimizer returned, "
                f"as in optimizer = torchmn.create_multi_node_optimizer({name}(...), comm)"
            )


def step_lock_of(optimizer: Optimizer) -> StepLock | None:
    """Returns the lock of an optimizer that a multi-node optimizer has wrapped, None for any other."""
    for hook in step_pre_hooks(optimizer).values():
        if isinstance(hook, StepLock):
            return hook
    return None
