"""The state of a training with global tensors: the same on every rank, whatever each rank holds of the model.

So a checkpoint of any mode on any number of ranks loads in any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.errors import ExperimentError
from torchmn.nn.slices import SlicedModule


class GlobalOptimizer:
    """An optimizer seen with global tensors, and its parameters by their names."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module):
        self.optimizer = optimizer
        self.owners = owners(model)

    def state_dict(self) -> dict[str, Any]:
        """Every rank must call it."""
        groups, state = [], {}
        for group in self.optimizer.param_groups:
            names = [self._name(parameter) for parameter in group["params"]]
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "names": names})
            for name, parameter in zip(names, group["params"], strict=True):
                kept = self.optimizer.state.get(parameter, {})
                state[name] = {key: self._whole(parameter, value) for key, value in sorted(kept.items())}
        return {"groups": groups, "state": state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        names = [[self._name(p) for p in group["params"]] for group in self.optimizer.param_groups]
        if [list(group["names"]) for group in saved["groups"]] != names:
            raise ExperimentError("the checkpoint's optimizer has other parameters than the experiment's")
        numbers = iter(range(sum(map(len, names))))
        groups, state = [], {}
        for group, own in zip(saved["groups"], self.optimizer.param_groups, strict=True):
            places = [next(numbers) for _ in own["params"]]
            groups.append({**{key: value for key, value in group.items() if key != "names"}, "params": places})
            for place, name, parameter in zip(places, group["names"], own["params"], strict=True):
                kept = saved["state"].get(name) or {}
                if kept:
                    state[place] = {key: self._part(parameter, value) for key, value in kept.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _name(self, parameter: Tensor) -> str:
        return self.owners[id(parameter)][0]

    def _whole(self, parameter: Tensor, value: Any) -> Any:
        """The global tensor of a value that belongs to a parameter and has its shape, such as a momentum."""
        _, module, name = self.owners[id(parameter)]
        if isinstance(module, SlicedModule) and isinstance(value, Tensor) and value.shape == parameter.shape:
            return module.gathered(name, value)
        return value

    def _part(self, parameter: Tensor, value: Any) -> Any:
        _, module, name = self.owners[id(parameter)]
        if isinstance(module, SlicedModule) and isinstance(value, Tensor) and value.dim() == parameter.dim() > 0:
            return module.sliced(name, value)
        return value


def owners(model: nn.Module) -> dict[int, tuple[str, nn.Module, str]]:
    """Of each parameter, by its id: its full name, the module that holds it, and its name there."""
    found = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, module, name))
    return found


def global_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters, with global tensors; every rank must call it."""
    found = {}
    for name, module, own in owners(model).values():
        gradient = module._parameters[own].grad  # type: ignore[union-attr]
        if gradient is not None:
            found[name] = module.gathered(own, gradient) if isinstance(module, SlicedModule) else gradient
    return found
