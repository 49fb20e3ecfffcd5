"""The state of a training with global tensors: the same on every rank, whatever each rank holds of the model.

So a checkpoint of any mode on any number of ranks loads in any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.errors import ExperimentError
from torchmn.parallel.global_state import WholeOptimizer, gathered, slices_of


class NamedOptimizer(WholeOptimizer):
    """An optimizer whose state dict is that of the serial one, and names its parameters: others' are refused."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module):
        super().__init__(optimizer, slices_of([model]))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "names": self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("names") != self._names:
            raise ExperimentError("the checkpoint's optimizer has other parameters than the experiment's")
        super().load_state_dict({key: value for key, value in state.items() if key != "names"})


def global_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters, with global tensors; every rank must call it."""
    slices = slices_of([model])
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            owner = slices.get(id(parameter))
            found[name] = parameter.grad if owner is None else gathered(owner, parameter.grad)
    return found
