"""State of training as global tensors, independent of the mode.

Therefore a checkpoint of any mode on any number of ranks loads in any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.errors import ExperimentError
from torchmn.parallel.global_state import GlobalOptimizerState, gathered, slice_owners


class NamedOptimizer(GlobalOptimizerState):
    """Global state of an optimizer with the names of its parameters, which must match when it is loaded."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module):
        super().__init__(optimizer, slice_owners([model]))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "names": self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("names") != self._names:
            raise ExperimentError("the optimizer in the checkpoint has different parameters than the experiment's")
        super().load_state_dict({key: value for key, value in state.items() if key != "names"})


def global_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of all parameters as global tensors. Every rank must call it."""
    owners = slice_owners([model])
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            owner = owners.get(id(parameter))
            gradients[name] = parameter.grad if owner is None else gathered(owner, parameter.grad)
    return gradients
