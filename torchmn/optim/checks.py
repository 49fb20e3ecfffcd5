"""Which optimizers can be wrapped, and what ranks must have been asked for alike."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.communicators.communicator import Communicator
from torchmn.gradient_role import role_of
from torchmn.optim.wrapper import WrappedOptimizer

OPERATION = "create_multi_node_optimizer"

# These compute each element of a parameter from that element alone, so a slice steps as the whole would.
_ELEMENT_BY_ELEMENT = (
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
    "SparseAdam",
)


# How a step is computed, and not what comes out: ranks may differ in it.
_ONLY_SPEED = ("foreach", "fused", "capturable", "differentiable")
_PLAIN = (bool, int, float, str, tuple)
_WIRE_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32)


def check(optimizer: Any, comm: Communicator, model: nn.Module | None, options: Mapping[str, Any]) -> None:
    """Raise on every rank if one can not wrap its optimizer, or if ranks would not make the same steps.

    options: what the ranks were asked for beside the optimizer, and must be asked for alike
    """
    problem = _option_problem(options) or _optimizer_problem(optimizer)
    if problem is None and model is not None:
        problem = _model_problem(optimizer, model) or _chain_problem(model, comm)
    problem = problem or _slice_problem(optimizer)
    same = {} if problem else {"optimizer": type(optimizer).__name__, **groups_as_text(optimizer), **options}
    comm.agree(OPERATION, problem, **same)


def groups_as_text(optimizer: Optimizer, first: int = 0) -> dict[str, str]:
    """What must be the same on all ranks in the groups from number `first` on: learning rate, momentum and so on."""
    return {f"group {n}": _values(group) for n, group in enumerate(optimizer.param_groups) if n >= first}


def _values(group: dict[str, Any]) -> str:
    """The plain values of a group. Tables and functions are left out: their texts say nothing, or where they lie."""
    values = {name: _plain_value(value) for name, value in group.items() if name not in _ONLY_SPEED}
    kept = {name: value for name, value in values.items() if value is not None}
    return f"({', '.join(f'{name} {value}' for name, value in kept.items())})"


def hyperparameters(optimizer: Optimizer) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Of each group, what the optimizer was made with or a schedule has set since: learning rate, momentum, betas."""
    groups = []
    for group in optimizer.param_groups:
        named = []
        for name in optimizer.defaults:
            if name not in _ONLY_SPEED:
                value = group.get(name)
                plain = value if isinstance(value, _PLAIN) else _plain_value(value)
                if plain is not None:
                    named.append((name, plain))
        groups.append(tuple(named))
    return tuple(groups)


def _plain_value(value: Any) -> Any:
    """A value that can be compared by what it says; None for others. A number on a GPU is not waited for."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.dim() == 0 else None
    return value if isinstance(value, _PLAIN) else None


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


def _chain_problem(model: nn.Module, comm: Communicator) -> str | None:
    """Whether `comm` joins ranks that hold different components of a chain: a mean over these mixes them."""
    # As long as nobody has loaded it there is no chain, and the optimizer need not load it either.
    chain_list: Any = sys.modules.get("torchmn.graph.chain_list")
    if chain_list is None:
        return None
    chains: list[Any] = [module for module in model.modules() if isinstance(module, chain_list.MultiNodeChainList)]
    for chain in chains:
        if chain.comm is not None:
            shared = set(chain.comm.world_ranks) & set(comm.world_ranks)
            if len(shared) > 1:
                return (
                    f"`model` is a MultiNodeChainList whose ranks hold different components, and {len(shared)} of them "
                    "would take the mean of their gradients. Use the torch optimizer as it is: it steps what its rank "
                    "holds. For several such chains, pass the communicator of the ranks that hold the same component"
                )
    return None


def _slice_problem(optimizer: Optimizer) -> str | None:
    """Why an optimizer of slices needs whole parameters, for norms and products; warns of one that is not known."""
    sliced = any(role_of(p).over is not None for group in optimizer.param_groups for p in group["params"])
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
