"""The gradient of a parameter that meets parts: each rank's share counts as often as there are ranks of an image.

Then whatever averages gradients over ranks is right. What a loss makes of the parameter outside of the model, such as
an L1 penalty, is the same on every rank, and must not count as often: so shares are counted where the parameter enters
a computation on parts, and not where its gradient is complete.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Shares:
    """What counts the shares of one parameter's gradient that come from parts."""

    def __init__(self, ranks: int):
        # As a tensor: torch takes twice as long to multiply by a number, and every parameter comes here at every step.
        self.factor = torch.tensor(float(ranks))
        self._takes_all = False

    def entering(self, parameter: Tensor) -> Tensor:
        """The parameter, for a computation on parts."""
        if self._takes_all or not (parameter.requires_grad and torch.is_grad_enabled()):
            return parameter
        used = parameter.view_as(parameter)
        used.register_hook(self._counted)
        return used

    def take_all(self, parameter: Tensor) -> None:
        """Let all of the gradient be shares: a layer of somebody's own takes the parameter as it is."""
        if not self._takes_all and parameter.requires_grad:
            self._takes_all = True
            parameter.register_hook(lambda gradient: gradient * self.factor)

    def _counted(self, gradient: Tensor) -> Tensor | None:
        # What entered before `take_all` is counted there.
        return None if self._takes_all else gradient * self.factor
