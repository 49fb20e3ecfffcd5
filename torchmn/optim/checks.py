"""Which optimizers can be wrapped, and what ranks must have been asked for alike."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchmn.communicators.base import Communicator
from torchmn.communicators.watchdog import Wait
from torchmn.optim.own_slices import replicas_of
from torchmn.optim.wrapper import WrappedOptimizer

OPERATION = "create_multi_node_optimizer"

# These compute each element of a parameter from that element alone, so a slice steps as the whole would.
_ELEMENT_BY_ELEMENT = (
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
    "SparseAdam",
)
# How a step is computed, and not what comes out: ranks may differ in it.
_ONLY_SPEED = ("foreach", "fused", "capturable", "differentiable")


_WIRE_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32)


def check(optimizer: Any, comm: Communicator, model: nn.Module | None, options: Mapping[str, Any]) -> None:
    """Raise on every rank if one can not wrap its optimizer, or if ranks would not make the same steps.

    options: what the ranks were asked for beside the optimizer, and must be asked for alike
    """
    problem = _option_problem(options) or _optimizer_problem(optimizer)
    if problem is None and model is not None:
        problem = _model_problem(optimizer, model)
    problem = problem or _slice_problem(optimizer)
    said = {} if problem else {"optimizer": type(optimizer).__name__, **groups_as_text(optimizer), **options}
    with Wait(comm, OPERATION):
        comm._meet(OPERATION, problem, tuple(said), tuple(map(str, said.values())))


def groups_as_text(optimizer: Optimizer, first: int = 0) -> dict[str, str]:
    """What must be the same on all ranks in the groups from number `first` on: learning rate, momentum and so on."""
    return {f"group {n}": _values(group) for n, group in enumerate(optimizer.param_groups) if n >= first}


def _values(group: dict[str, Any]) -> str:
    """The plain values of a group. Tensors and functions are left out: their texts say nothing, or where they lie."""
    plain = (bool, int, float, str, tuple)
    kept = {name: value for name, value in group.items() if isinstance(value, plain) and name not in _ONLY_SPEED}
    return f"({', '.join(f'{name} {value}' for name, value in kept.items())})"


def _option_problem(options: Mapping[str, Any]) -> str | None:
    if options["double_buffering"] and options["overlap"]:
        return "expected double_buffering or overlap, got both: each hides the same messages"
    if options["grad_dtype"] not in _WIRE_DTYPES:
        return f"expected grad_dtype to be torch.float16, torch.bfloat16 or None, got {options['grad_dtype']!r}"
    return None


def _optimizer_problem(optimizer: Any) -> str | None:
    if isinstance(optimizer, WrappedOptimizer):
        return "this optimizer is a multi-node optimizer already"
    if not isinstance(optimizer, Optimizer):
        return f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
    return None


def _model_problem(optimizer: Optimizer, model: Any) -> str | None:
    """Whether `optimizer` was made for another model than `model`; lets a parallel one look at its parameters."""
    if not isinstance(model, nn.Module):
        return f"expected model to be a torch.nn.Module, got {type(model).__name__}"
    parallelism = getattr(model, "parallelism", None)
    if parallelism is not None:
        parallelism.adopt(model)  # slices must be known as such before anything is sent
    own = {id(p) for p in model.parameters()}
    if own and not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        return (
            f"{type(optimizer).__name__} holds none of the parameters of `model`, which it would never change. "
            "parallelize works on a copy: make the optimizer of the model that it returns"
        )
    return None


def _slice_problem(optimizer: Optimizer) -> str | None:
    """Why an optimizer of slices needs whole parameters, for norms and products; warns of one that is not known."""
    sliced = any(replicas_of(p) is not None for group in optimizer.param_groups for p in group["params"])
    kind = type(optimizer)
    if not sliced or any(base.__name__ in _ELEMENT_BY_ELEMENT for base in kind.__mro__):
        return None
    problem = (
        f"{kind.__name__} may compute over whole parameters, of which split layers hold slices: numbers could differ "
        "from those of one rank. Use SGD, Adam or another optimizer that works element by element, or mode='datapar'"
    )
    if kind.__module__.startswith("torch.optim"):
        return problem
    warnings.warn(problem, stacklevel=4)
    return None
