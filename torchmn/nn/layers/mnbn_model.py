"""create_mnbn_model: returns a copy of a model with multi-node batch normalisation."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer

from torchmn._torch_compat import BatchNorm
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.nn.layers.batch_norm import (
    LazyMultiNodeBatchNorm1d,
    LazyMultiNodeBatchNorm2d,
    LazyMultiNodeBatchNorm3d,
    MultiNodeBatchNorm,
    MultiNodeBatchNorm1d,
    MultiNodeBatchNorm2d,
    MultiNodeBatchNorm3d,
)
from torchmn.other_spellings import other_spellings

AnyModule = TypeVar("AnyModule", bound=nn.Module)

MULTI_NODE: dict[type, type[MultiNodeBatchNorm]] = {
    nn.BatchNorm1d: MultiNodeBatchNorm1d,
    nn.BatchNorm2d: MultiNodeBatchNorm2d,
    nn.BatchNorm3d: MultiNodeBatchNorm3d,
    nn.LazyBatchNorm1d: LazyMultiNodeBatchNorm1d,
    nn.LazyBatchNorm2d: LazyMultiNodeBatchNorm2d,
    nn.LazyBatchNorm3d: LazyMultiNodeBatchNorm3d,
}


@other_spellings
def create_mnbn_model(model: AnyModule, comm: Communicator) -> AnyModule:
    """Returns a deep copy of `model` in which every BatchNorm1d, 2d and 3d normalises over the batches of all ranks.

    Lazy layers stay lazy: the first forward gives them their shape.

    Collective: all ranks must call it, with the same model. Names, `state_dict`, hooks and settings stay, a module that
    is registered several times stays one module, and multi-node layers of `comm` stay as they are.

    Args:
        model: the model. It is not changed.
        comm: the ranks over whose batches to normalise.

    Returns:
        The copy, of the same class.

    Raises:
        ArgumentError: on every rank, if a layer cannot be replaced with the same numbers, such as SyncBatchNorm, or a
            subclass with another forward. The error names the layer.
    """
    comm = as_communicator(comm, "create_mnbn_model")
    problem = _problem(model, comm)
    copied, layers = None, {}
    if problem is None:
        layers = _replaceable(model)
        try:
            copied = _copy(model, list(layers.values()), comm)
        except Exception as error:  # deepcopy runs code of the modules, which may raise any error
            problem = f"expected a model that can be copied, got {type(error).__name__}: {error}"
    if copied is not None and (left := _replaceable(copied)):
        problem = f"expected a __deepcopy__ that passes its memo on, got one that creates {', '.join(left)} again"
    signature = tuple(f"{name or '(the model)'}: {layer}" for name, layer in layers.items())
    comm.agree("create_mnbn_model", problem, layers=signature)
    assert copied is not None
    return copied


def _replaceable(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module) in MULTI_NODE}


def _copy(model: AnyModule, layers: list[nn.Module], comm: Communicator) -> AnyModule:
    """Returns a deep copy of `model` in which every reference to one of `layers` refers to a multi-node layer.

    That has the attributes of torch's layer, including parameters, buffers and hooks, and the communicator.
    """
    memo: dict[int, Any] = {}  # of deepcopy: id of an object -> its copy
    for buffer in model.buffers():
        if isinstance(buffer, UninitializedBuffer):  # torch cannot copy it
            lazy_buffer: Any = UninitializedBuffer  # its type is declared with other arguments than it has
            memo[id(buffer)] = lazy_buffer(device=buffer.device, dtype=buffer.dtype)
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
    """Returns why `module` cannot be replaced by a multi-node layer; None if it can, or need not."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(module, MultiNodeBatchNorm):
        return None if module.comm is comm else f"{name}, which already has another communicator"
    if isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in getattr(module, "original_name", ""):
        return f"scripted {module.original_name}: convert the model before torch.jit.script"
    if not isinstance(module, BatchNorm):
        return None
    if isinstance(module, nn.SyncBatchNorm):
        return f"{name} uses another process group: build the model with nn.BatchNorm1d, 2d or 3d instead"
    if kind not in MULTI_NODE:
        return f"{name}, an unknown subclass of BatchNorm: use nn.BatchNorm1d, 2d or 3d"
    if "forward" in vars(module):
        return f"{name}, whose forward was replaced"
    return None
