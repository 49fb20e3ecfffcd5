"""State dicts of parallel models and their optimizers with global tensors, as on one rank, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.errors import ArgumentError
from torchmn.gradient_role import role_of
from torchmn.nn.layers.sliced_module import SlicedModule


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a parallel model with global tensors, as the model on one rank has it.

    Collective: every rank must call it, and gets the whole state dict. It can be loaded into the plain model, and with
    `model.load_state_dict` into a parallel model on any other grid and mode.

    Args:
        model: a model that `torchmn.parallelize` returned, or any other module.

    Returns:
        The state dict, with the same keys as `model.state_dict()`.
    """
    state = dict(model.state_dict())
    for prefix, module in model.named_modules():
        if isinstance(module, SlicedModule):
            for name in sorted(module.sliced_parameters):
                key = f"{prefix}.{name}" if prefix else name
                state[key] = module.gathered(name, state[key].detach())
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads a state dict with global tensors, of which each rank takes its slices. Same as `model.load_state_dict`.

    Args:
        model: a model that `torchmn.parallelize` returned, or any other module.
        state: what `full_state_dict` returned, or the state dict of the plain model.
    """
    model.load_state_dict(state)


Owner = tuple[SlicedModule, str]  # the module that holds a slice, and the name of the parameter in it


def with_global_state(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns these objects, with parallel models and their optimizers wrapped so that their state dicts are global.

    Args:
        objects: by name, as passed to `save` of a checkpointer.

    Returns:
        The objects by the same names.

    Raises:
        ArgumentError: if the model of an optimizer is missing.
    """
    models = [obj for obj in objects.values() if isinstance(obj, nn.Module) and _is_parallel(obj)]
    owners = slice_owners(models)
    return {name: _with_global_state(name, obj, models, owners) for name, obj in objects.items()}


def _is_parallel(model: nn.Module) -> bool:
    """Whether a model, or a submodule such as that of an AveragedModel, went through `parallelize`."""
    return any(hasattr(module, "parallelism") for module in model.modules())


def _with_global_state(name: str, obj: Any, models: list[nn.Module], owners: dict[int, Owner]) -> Any:
    if any(obj is model for model in models):
        return GlobalModelState(obj)
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
    return GlobalOptimizerState(obj, owners)


class GlobalModelState:
    """A parallel model with a global state dict; every rank must call its methods."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return full_state_dict(self.model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(dict(state))


class GlobalOptimizerState:
    """An optimizer with a global state dict; every rank must call its methods.

    Args:
        optimizer: the optimizer.
        owners: of the slices that it steps, from `slice_owners`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owners: dict[int, Owner]):
        self._optimizer, self._owners = optimizer, owners

    def state_dict(self) -> dict[str, Any]:
        return self._convert(self._optimizer.state_dict(), gathered)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(self._convert(state, sliced))

    def _convert(self, saved: Mapping[str, Any], convert: Callable[[Owner, Any], Any]) -> dict[str, Any]:
        """Returns the state dict, with the state of every sliced parameter converted."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = {}
        for place, values in saved["state"].items():
            owner = self._owners.get(id(parameters[int(place)])) if str(place).isdigit() else None
            state[place] = values if owner is None else {key: convert(owner, values[key]) for key in sorted(values)}
        return {**saved, "state": state}


def gathered(owner: Owner, value: Any) -> Any:
    """Returns the global tensor of a value with the shape of a slice, such as a momentum; others as they are."""
    module, name = owner
    parameter = module.get_parameter(name)
    return module.gathered(name, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value


def sliced(owner: Owner, value: Any) -> Any:
    """Returns this rank's slice of a global tensor; other values, such as a step count, as they are."""
    module, name = owner
    parameter = module.get_parameter(name)
    return module.sliced(name, value) if isinstance(value, Tensor) and value.dim() == parameter.dim() > 0 else value


def slice_owners(models: Iterable[nn.Module]) -> dict[int, Owner]:
    """Returns the owners of all parameters that are slices, by the ids of the parameters."""
    return {
        id(parameter): (module, name)
        for model in models
        for module in model.modules()
        if isinstance(module, SlicedModule)
        for name, parameter in module.named_parameters(recurse=False)
        if name in module.sliced_parameters
    }
