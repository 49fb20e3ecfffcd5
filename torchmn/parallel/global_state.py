"""Models and optimizers of a grid, seen with the global tensors of the serial ones: what a checkpoint should hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.errors import ArgumentError
from torchmn.gradient_role import role_of
from torchmn.nn.layers.slices import SlicedModule


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of the serial model: the same keys, global tensors. Every rank must call it, and gets it.

    It loads into the plain model, and with `model.load_state_dict` into a model on any other grid and mode.
    """
    state = dict(model.state_dict())
    for prefix, module in model.named_modules():
        if isinstance(module, SlicedModule):
            for name in sorted(module.cut_parameters):
                key = f"{prefix}.{name}" if prefix else name
                state[key] = module.gathered(name, state[key].detach())
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a serial model's state dict: each rank takes its part. The same as `model.load_state_dict`."""
    model.load_state_dict(state)


Owner = tuple[SlicedModule, str]  # who holds a slice, and by which name


def seen_whole(objects: Mapping[str, Any]) -> dict[str, Any]:
    """`objects`, the parallel models and their optimizers among them wrapped so that their state is the serial one."""
    models = [obj for obj in objects.values() if isinstance(obj, nn.Module) and _is_parallel(obj)]
    owners = slices_of(models)
    return {name: _seen_whole(name, obj, models, owners) for name, obj in objects.items()}


def _is_parallel(model: nn.Module) -> bool:
    """Whether it went through `parallelize`, or holds one that did, as an average of its weights does."""
    return any(hasattr(module, "parallelism") for module in model.modules())


def _seen_whole(name: str, obj: Any, models: list[nn.Module], owners: dict[int, Owner]) -> Any:
    if any(obj is model for model in models):
        return WholeModel(obj)
    groups = getattr(obj, "param_groups", None)
    if isinstance(obj, nn.Module) or not isinstance(groups, list):
        return obj
    slices = [p for group in groups for p in group["params"] if role_of(p).over is not None]
    if not slices:
        return obj
    if any(id(p) not in owners for p in slices):
        raise ArgumentError(
            f"{name} holds slices of a parallel model: pass the model too, save(step, model=..., {name}=...), so that "
            "the checkpoint can hold global tensors"
        )
    return WholeOptimizer(obj, owners)


class WholeModel:
    """A parallel model whose state dict is the serial model's; every rank must call its methods."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return full_state_dict(self.model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(dict(state))


class WholeOptimizer:
    """An optimizer whose state dict is that of the serial one; every rank must call its methods.

    `owners`: of the slices that it steps, see `slices_of`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owners: dict[int, Owner]):
        self._optimizer, self._owners = optimizer, owners

    def state_dict(self) -> dict[str, Any]:
        return self._changed(self._optimizer.state_dict(), gathered)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(self._changed(state, sliced))

    def _changed(self, saved: Mapping[str, Any], change: Any) -> dict[str, Any]:
        """The state dict, with every tensor of a sliced parameter changed; those of the others as they are."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = {}
        for place, kept in saved["state"].items():
            owner = self._owners.get(id(parameters[int(place)])) if str(place).isdigit() else None
            state[place] = kept if owner is None else {key: change(owner, kept[key]) for key in sorted(kept)}
        return {**saved, "state": state}


def gathered(owner: Owner, value: Any) -> Any:
    """The global tensor of a value that goes with a slice and has its shape, as a momentum; others as they are."""
    module, name = owner
    mine = module.get_parameter(name)
    return module.gathered(name, value) if isinstance(value, Tensor) and value.shape == mine.shape else value


def sliced(owner: Owner, value: Any) -> Any:
    """This rank's part of a global tensor that goes with a slice; others, as a count of steps, as they are."""
    module, name = owner
    mine = module.get_parameter(name)
    return module.sliced(name, value) if isinstance(value, Tensor) and value.dim() == mine.dim() > 0 else value


def slices_of(models: Iterable[nn.Module]) -> dict[int, Owner]:
    """Every parameter that is a slice, by its id: the module that holds it and its name there."""
    return {
        id(parameter): (module, name)
        for model in models
        for module in model.modules()
        if isinstance(module, SlicedModule)
        for name, parameter in module.named_parameters(recurse=False)
        if name in module.cut_parameters
    }
