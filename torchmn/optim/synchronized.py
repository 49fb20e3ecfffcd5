"""SynchronizedGradients: which gradients are means already, between `synchronize` and `step`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchmn.optim.gradients import Gradient


class SynchronizedGradients:
    """The gradients that `synchronize` has replaced by means."""

    def __init__(self) -> None:
        self._means: dict[int, Tensor | None] = {}  # by parameter
        self._hooks: list[Any] = []
        self.unchanged = False  # whether no backward has added to them since

    def set(self, grads: Sequence[Gradient]) -> None:
        """Records that these are means now."""
        self.clear()
        self.unchanged = True
        self._means = {id(grad.parameter): grad.parameter.grad for grad in grads}
        for grad in grads:
            if grad.parameter.requires_grad:
                self._hooks.append(grad.parameter.register_post_accumulate_grad_hook(self._on_backward))

    def clear(self) -> None:
        """Records that there are none any more."""
        self.unchanged = False
        self._means = {}
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def cover(self, grads: Sequence[Gradient]) -> bool:
        """Whether all of these were averaged, and no backward has added to them. The user may have replaced some."""
        present = [id(grad.parameter) for grad in grads if grad.value is not None]
        return self.unchanged and all(self._means.get(parameter) is not None for parameter in present)

    def are(self, grads: Sequence[Gradient]) -> bool:
        """Whether these are the same tensors that were averaged: none is new, replaced or removed since."""
        unknown = object()
        return self.unchanged and all(self._means.get(id(grad.parameter), unknown) is grad.value for grad in grads)

    def _on_backward(self, _: Tensor) -> None:
        self.unchanged = False
