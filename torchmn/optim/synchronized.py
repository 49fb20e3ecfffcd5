"""What `synchronize` leaves until `step`: gradients that are means already, as long as nobody touches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchmn.optim.gradients import Gradient


class SynchronizedGradients:
    """The gradients that `synchronize` has made means of; none at first."""

    def __init__(self) -> None:
        self._means: dict[int, Tensor | None] = {}  # by parameter
        self._watching: list[Any] = []
        self.untouched = False  # since then no backward has added to one of them

    def remember(self, grads: Sequence[Gradient]) -> None:
        """These are means now."""
        self.forget()
        self.untouched = True
        self._means = {id(grad.parameter): grad.parameter.grad for grad in grads}
        for grad in grads:
            if grad.parameter.requires_grad:
                self._watching.append(grad.parameter.register_post_accumulate_grad_hook(self._touched))

    def forget(self) -> None:
        """There are none any more."""
        self.untouched = False
        self._means = {}
        for handle in self._watching:
            handle.remove()
        self._watching.clear()

    def cover(self, grads: Sequence[Gradient]) -> bool:
        """Whether all of these were averaged, and no backward has added to them; the user may have replaced some."""
        present = [id(grad.parameter) for grad in grads if grad.value is not None]
        return self.untouched and all(self._means.get(parameter) is not None for parameter in present)

    def are(self, grads: Sequence[Gradient]) -> bool:
        """Whether these are the very tensors that were averaged: none is new, replaced or removed since."""
        unknown = object()
        return self.untouched and all(self._means.get(id(grad.parameter), unknown) is grad.value for grad in grads)

    def _touched(self, _: Tensor) -> None:
        self.untouched = False
