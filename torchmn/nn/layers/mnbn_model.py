"""create_mnbn_model: an ordinary model in, the same model with multi-node batch normalisation out."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from torchmn._torch_compat import BatchNorm
from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.nn.layers.batch_norm import (
    MultiNodeBatchNorm,
    MultiNodeBatchNorm1d,
    MultiNodeBatchNorm2d,
    MultiNodeBatchNorm3d,
)

Model = TypeVar("Model", bound=nn.Module)

MULTI_NODE: dict[type, type[MultiNodeBatchNorm]] = {
    nn.BatchNorm1d: MultiNodeBatchNorm1d,
    nn.BatchNorm2d: MultiNodeBatchNorm2d,
    nn.BatchNorm3d: MultiNodeBatchNorm3d,
}


def create_mnbn_model(model: Model, comm: Communicator) -> Model:
    """A deep copy of `model` in which every BatchNorm1d, 2d and 3d normalises over the batches of all ranks.

    Names, `state_dict`, hooks and settings stay; a module that stands in several places stays one module. Layers
    that already are multi-node ones of `comm` stay. A layer that can not be replaced with the same numbers, such as
    SyncBatchNorm, a lazy layer without its shape yet or a subclass with a forward of its own, is an error that
    names it. All ranks must call this, with the same model; an error on one is raised on all.
    """
    if not isinstance(comm, Communicator):
        raise ArgumentError(f"create_mnbn_model: expected comm to be a communicator, got {describe(comm)}")
    problem = _problem(model, comm)
    copied, layers = None, {}
    if problem is None:
        layers = _replaceable(model)
        try:
            copied = _copied(model, list(layers.values()), comm)
        except Exception as error:  # copying runs the modules' own code, which may raise anything
            problem = f"expected a model that can be copied, got {type(error).__name__}: {error}"
    if copied is not None and (left := _replaceable(copied)):
        problem = f"expected a __deepcopy__ that passes its memo on, got one that makes {', '.join(left)} anew"
    signature = tuple(f"{name or '(the model)'}: {layer}" for name, layer in layers.items())
    comm.agree("create_mnbn_model", problem, layers=signature)
    assert copied is not None
    return copied


def _replaceable(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module) in MULTI_NODE}


def _copied(model: Model, layers: list[nn.Module], comm: Communicator) -> Model:
    """A deep copy of `model` in which all that refers to one of `layers` refers to a multi-node one in its place.

    A multi-node layer has the attributes of torch's, parameters, buffers and hooks among them, and its communicator.
    """
    memo: dict[int, Any] = {}  # of deepcopy: by id, what stands for an object in the copy
    for layer in layers:
        kind = MULTI_NODE[type(layer)]
        memo[id(layer)] = kind.__new__(kind)
    for layer in layers:
        memo[id(layer)].__dict__.update(deepcopy(layer.__dict__, memo), comm=comm)
    return deepcopy(model, memo)


def _problem(model: object, comm: Communicator) -> str | None:
    if not isinstance(model, nn.Module):
        return f"expected a torch.nn.Module, got {type(model).__name__}"
    wrong = [f"{name or 'the model'} ({why})" for name, m in model.named_modules() if (why := _why_not(m, comm))]
    return f"cannot replace {'; '.join(wrong)}" if wrong else None


def _why_not(module: nn.Module, comm: Communicator) -> str | None:
    """Why a multi-node layer in the place of `module` would give other numbers than `module` means; else None."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(module, MultiNodeBatchNorm):
        return None if module.comm is comm else f"{name}, which already has another communicator"
    if isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in getattr(module, "original_name", ""):
        return f"scripted {module.original_name}: convert the model before torch.jit.script"
    if not isinstance(module, BatchNorm):
        return None
    if isinstance(module, LazyModuleMixin):
        return f"{name} has no shape yet: run one forward pass first"
    if isinstance(module, nn.SyncBatchNorm):
        return f"{name} has a process group of its own: build the model with nn.BatchNorm1d, 2d or 3d instead"
    if kind not in MULTI_NODE:
        return f"{name}, a subclass of BatchNorm whose meaning is not known here: use nn.BatchNorm1d, 2d or 3d"
    if "forward" in vars(module):
        return f"{name} with a forward of its own"
    return None
